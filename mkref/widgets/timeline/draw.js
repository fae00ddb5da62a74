// Drawing: the canvas from `state`, which page.js makes and move.js changes.

function draw(state) {
  const { canvas, context, data, meta } = state;
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth,
    height = state.rowsHeight + AXIS;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, width, height);
  const x = (t) => GUTTER + ((t - state.t0) / (state.t1 - state.t0)) * (width - GUTTER - 8);
  state.width = width;

  drawAxis(state, x);
  context.save();
  context.beginPath();
  context.rect(0, 0, width, state.rowsHeight);
  context.clip();
  const first = Math.floor(state.scroll / state.row);
  const last = Math.min(meta.n_sm - 1, Math.floor((state.scroll + state.rowsHeight) / state.row));
  for (let sm = first; sm <= last; sm++) drawLane(state, sm, sm * state.row - state.scroll, x);
  context.restore();
  if (data.n === 0) context.fillText("no task was stamped", GUTTER + 8, 20);
  // For people who look, and for tests that cannot: where the view stands.
  canvas.dataset.t0 = Math.round(state.t0);
  canvas.dataset.t1 = Math.round(state.t1);
}

function drawAxis(state, x) {
  const { context, meta } = state;
  const span = state.t1 - state.t0;
  let step = 1;
  for (let k = 0; span / step > state.width / 110; k++)
    step = [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3);
  context.font = "11px DejaVu Sans, Verdana, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (let t = Math.ceil(state.t0 / step) * step; t <= state.t1; t += step) {
    context.fillStyle = meta.colors.grid;
    context.fillRect(x(t), 0, 1, state.rowsHeight + 5);
    context.fillStyle = meta.colors.ink;
    context.fillText(formatNs(t), Math.min(x(t), state.width - 24), state.rowsHeight + 18);
  }
}

function drawLane(state, sm, top, x) {
  const { context, data, meta } = state;
  const lane = data.lanes[sm];
  const { bars, side, strip } = rowParts(state);
  context.lineWidth = 0.5;
  drawTasks(state, data.turns[sm], top, bars, x);
  if (side) drawTasks(state, data.sides[sm], top + bars + 1, side - 1, x);
  if (strip) drawLoader(state, lane, top + bars + side + 1, x);
  if (state.selected >= lane[0] && state.selected < lane[1]) {
    const isSide = meta.ops[data.op[state.selected]].beside;
    if (!isSide) outlineSelected(state, top, bars, x);
    else if (side) outlineSelected(state, top + bars + 1, side - 1, x);
  }
  // SM 0's label is pushed down into the picture, so the next must leave it more room.
  if (state.row >= 14 || sm % Math.ceil(20 / state.row) === 0) {
    context.fillStyle = meta.colors.ink;
    context.font = "11px DejaVu Sans, Verdana, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(`SM ${sm}`, GUTTER - 8, Math.max(top + state.row / 2 - 1, 7));
  }
}

// Tasks that follow one another in time.
function drawTasks(state, tasks, top, height, x) {
  const { data } = state;
  let drawnTo = -1; // bars below half a pixel at the same place are drawn once
  for (let k = firstAfter(data, tasks, state.t0); k < tasks.length; k++) {
    const i = tasks[k];
    if (data.begin[i] >= state.t1) break;
    const a = Math.max(x(data.begin[i]), GUTTER),
      b = Math.max(x(data.ready[i]), GUTTER);
    const c = Math.min(Math.max(x(data.end[i]), GUTTER), state.width);
    if (c - a < 0.5 && c < drawnTo + 0.5 && i !== state.selected) continue;
    drawnTo = c;
    drawTask(state, i, top, height, a, b, c);
  }
}

// One task: hatched from `a` to `b` while it waits, filled from `b` to `c` while it works.
// A wait beside the others holds nobody up and is left out.
function drawTask(state, i, top, height, a, b, c) {
  const { context, data, meta, look } = state;
  const op = meta.ops[data.op[i]];
  if (b - a > 0.3 && !op.beside) {
    context.fillStyle = look.wait;
    context.fillRect(a, top, b - a, height);
  }
  const w = Math.max(c - b, 0.5);
  context.fillStyle = look.ops[data.op[i]];
  context.fillRect(b, top, w, height);
  if (w > 3 && height > 4) {
    context.strokeStyle = meta.colors.outline;
    context.strokeRect(b, top, w, height);
  }
  if (w < 12 || height < 11) return;
  context.font = "11px DejaVu Sans, Verdana, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = op.ink;
  context.fillText(w >= 74 ? op.name : op.letter, b + w / 2, top + height / 2 + 0.5);
}

// The loader's strip: from the moment the task before was issued to the moment this one was.
function drawLoader(state, lane, top, x) {
  const { context, data, meta, look } = state;
  let before = 0;
  for (let i = lane[0]; i < lane[1] && before < state.t1; i++) {
    const until = data.issued[i];
    if (until < 0 || meta.ops[data.op[i]].beside) continue;
    if (meta.ops[data.op[i]].streams && until > state.t0) {
      const a = Math.max(x(before), GUTTER),
        b = Math.min(x(until), state.width);
      context.fillStyle = look.ops[data.op[i]];
      context.fillRect(a, top, Math.max(b - a, 0.5), LOADER);
    }
    before = until;
  }
}

function outlineSelected(state, top, height, x) {
  const { context, data, selected } = state;
  const a = Math.max(x(data.begin[selected]), GUTTER),
    b = Math.min(x(data.end[selected]), state.width);
  if (b < a) return;
  context.lineWidth = 3;
  context.strokeStyle = "#000000";
  context.strokeRect(a - 1, top, Math.max(b - a, 2) + 2, height);
}
