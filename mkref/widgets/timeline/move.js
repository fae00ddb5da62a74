// Moving: zoom, pan, rows, and which task is where. Every function ends in a drawing.

// Keep the window inside the longest run, a little air on the right.
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
  layOut(state);
  setScroll(state, state.scroll);
}

function setScroll(state, to) {
  const most = Math.max(state.contentHeight - state.panels[0].height, 0);
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
  const { panel, k } = state.places[data.laneOf(i)];
  const top = k * state.row;
  if (top < state.scroll) setScroll(state, top);
  else if (top + state.row > state.scroll + panel.height)
    setScroll(state, top + state.row - panel.height);
}

function taskAt(state, px, py) {
  const lane = laneAt(state, py);
  if (px < GUTTER || lane < 0) return -1;
  const t = state.t0 + ((px - GUTTER) / (state.width - GUTTER - 8)) * (state.t1 - state.t0);
  const { bars, side } = rowParts(state);
  const y = py - topOf(state, lane);
  const inSide = side > 0 && y > bars && y <= bars + side;
  const tasks = (inSide ? state.data.sides : state.data.turns)[lane];
  const i = tasks[firstAfter(state.data, tasks, t)];
  return i !== undefined && state.data.begin[i] <= t ? i : -1;
}

// The task that another SM of the same run was at when this one began.
function neighbour(state, by) {
  const { data, meta, selected } = state;
  const run = data.run[selected];
  const sm = Math.min(Math.max(data.sm[selected] + by, 0), meta.runs[run].n_sm - 1);
  const tasks = data.turns[run * meta.n_sm + sm];
  if (tasks.length === 0) return selected;
  return tasks[Math.min(firstAfter(data, tasks, data.ready[selected]), tasks.length - 1)];
}

// Along the edges: back to what held the selected task up; on along the critical path, or to the
// first that waited for it.
function follow(state, forward) {
  const { data, meta, selected: i } = state;
  if (!forward) return data.cause[i] >= 0 ? data.cause[i] : i;
  const path = meta.runs[data.run[i]].path;
  const at = path.indexOf(i);
  if (at >= 0 && at + 1 < path.length) return path[at + 1];
  return edgesOf(state, i).waiting[0] ?? i;
}
