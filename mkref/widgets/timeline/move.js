// Moving: zoom, pan, rows, and which task is where. Every function ends in a drawing.

// Keep the window inside the trace, a little air on the right.
function setWindow(state, t0, t1) {
  const most = Math.max(state.meta.span_ns * 1.02, MIN_SPAN);
  const span = Math.min(Math.max(t1 - t0, MIN_SPAN), most);
  state.t0 = Math.min(Math.max(t0, 0), most - span);
  state.t1 = state.t0 + span;
  draw(state);
}

// Around the selected task if it is in sight, else around the middle.
function zoomCentre(state) {
  const { data, selected: i } = state;
  const at = i < 0 ? -1 : (data.begin[i] + data.end[i]) / 2;
  return at >= state.t0 && at <= state.t1 ? at : (state.t0 + state.t1) / 2;
}

function zoom(state, factor, at = zoomCentre(state)) {
  setWindow(state, at - (at - state.t0) * factor, at + (state.t1 - at) * factor);
}

function pan(state, share) {
  const by = (state.t1 - state.t0) * share;
  setWindow(state, state.t0 + by, state.t1 + by);
}

function setRows(state, compact) {
  state.compact = compact;
  state.row = compact ? Math.max(Math.min(TALL, MAX_HEIGHT / state.meta.n_sm), 1) : TALL;
  state.rowsHeight = Math.min(MAX_HEIGHT, state.row * state.meta.n_sm);
  setScroll(state, state.scroll);
}

function setScroll(state, to) {
  const most = Math.max(state.row * state.meta.n_sm - state.rowsHeight, 0);
  state.scroll = Math.min(Math.max(to, 0), most);
  draw(state);
}

// Make the selected task visible without changing the zoom.
function reveal(state) {
  const { data, selected: i } = state;
  const span = state.t1 - state.t0;
  if (data.end[i] < state.t0 || data.begin[i] > state.t1) {
    const middle = (data.begin[i] + data.end[i]) / 2;
    setWindow(state, middle - span / 2, middle + span / 2);
  }
  const top = data.sm[i] * state.row;
  if (top < state.scroll) setScroll(state, top);
  else if (top + state.row > state.scroll + state.rowsHeight)
    setScroll(state, top + state.row - state.rowsHeight);
}

function taskAt(state, px, py) {
  const sm = Math.floor((py + state.scroll) / state.row);
  if (px < GUTTER || py > state.rowsHeight || sm < 0 || sm >= state.meta.n_sm) return -1;
  const t = state.t0 + ((px - GUTTER) / (state.width - GUTTER - 8)) * (state.t1 - state.t0);
  const { bars, side } = rowParts(state);
  const y = py + state.scroll - sm * state.row;
  const inSide = side > 0 && y > bars && y <= bars + side;
  const tasks = (inSide ? state.data.sides : state.data.turns)[sm];
  const i = tasks[firstAfter(state.data, tasks, t)];
  return i !== undefined && state.data.begin[i] <= t ? i : -1;
}

// The task that another SM was at when this one began.
function neighbour(state, by) {
  const { data, meta, selected } = state;
  const sm = Math.min(Math.max(data.sm[selected] + by, 0), meta.n_sm - 1);
  const tasks = data.turns[sm];
  if (tasks.length === 0) return selected;
  return tasks[Math.min(firstAfter(data, tasks, data.ready[selected]), tasks.length - 1)];
}
