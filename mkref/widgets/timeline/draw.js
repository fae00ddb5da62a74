// Drawing: the canvas from `state`, which page.js makes and move.js changes.

function draw(state) {
  const { canvas, context, data } = state;
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
  state.width = width;
  const x = (t) => timeToX(state, t);

  for (const panel of state.panels) drawBands(state, panel);
  drawAxis(state, x);
  for (const panel of state.panels) if (panel.run >= 0) drawTitle(state, panel);
  for (const panel of state.panels) drawLanes(state, panel, x);
  drawPath(state);
  drawEdges(state);
  if (state.selected >= 0) outlineSelected(state, x);
  if (data.n === 0) context.fillText("no task was stamped", GUTTER + 8, 20);
  // For people who look, and for tests that cannot: where the view stands.
  canvas.dataset.t0 = Math.round(state.t0);
  canvas.dataset.t1 = Math.round(state.t1);
}

// Bands keep the two runs of an SM together.
function drawBands(state, panel) {
  const { context, meta } = state;
  if (panel.run >= 0 || !twoRuns(meta)) return;
  inside(state, panel, () => {
    context.fillStyle = "#f0f0f0";
    for (let sm = 1; sm < meta.n_sm; sm += 2)
      context.fillRect(0, topOf(state, sm) - 1, state.width, 2 * state.row - 1);
  });
}

function drawTitle(state, panel) {
  const { context, meta } = state;
  const run = meta.runs[panel.run];
  context.fillStyle = "#ffffff";
  context.fillRect(0, panel.top - TITLE, state.width, TITLE);
  context.fillStyle = meta.colors.ink;
  context.font = `bold ${FONT}`;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(`${run.letter}: ${run.title}`, GUTTER, panel.top - TITLE / 2);
}

function inside(state, panel, work) {
  const { context } = state;
  context.save();
  context.beginPath();
  context.rect(0, panel.top, state.width, panel.height);
  context.clip();
  work();
  context.restore();
}

function drawLanes(state, panel, x) {
  const first = Math.floor(state.scroll / state.row);
  const last = Math.min(
    panel.lanes.length - 1,
    Math.floor((state.scroll + panel.height) / state.row),
  );
  inside(state, panel, () => {
    for (let k = first; k <= last; k++) drawLane(state, panel, k, x);
  });
}

function drawAxis(state, x) {
  const { context, meta } = state;
  const span = state.t1 - state.t0;
  let step = 1;
  for (let k = 0; span / step > state.width / 110; k++)
    step = [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3);
  context.font = FONT;
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (let t = Math.ceil(state.t0 / step) * step; t <= state.t1; t += step) {
    context.fillStyle = meta.colors.grid;
    context.fillRect(x(t), 0, 1, state.rowsHeight + 5);
    context.fillStyle = meta.colors.ink;
    context.fillText(formatNs(t), Math.min(x(t), state.width - 24), state.rowsHeight + 18);
  }
}

function drawLane(state, panel, k, x) {
  const { context, data, meta } = state;
  const lane = panel.lanes[k];
  const top = topOf(state, lane);
  const { bars, side, strip } = rowParts(state);
  context.lineWidth = 0.5;
  drawTasks(state, data.turns[lane], top, bars, x);
  if (side) drawTasks(state, data.sides[lane], top + bars + 1, side - 1, x);
  if (strip) drawLoader(state, data.lanes[lane], top + bars + side + 1, x);
  // The first label is pushed down into the picture, so the next must leave it more room.
  if (state.row >= 14 || k % Math.ceil(20 / state.row) === 0) {
    const run = Math.floor(lane / meta.n_sm);
    const both = twoRuns(meta) && panel.run < 0 && state.row >= 14;
    const letter = both ? ` ${meta.runs[run].letter}` : "";
    context.fillStyle = meta.colors.ink;
    context.font = FONT;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const y = Math.max(top + state.row / 2 - 1, panel.top + 7);
    context.fillText(`SM ${lane % meta.n_sm}${letter}`, GUTTER - 8, y);
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

// One task: hatched from `a` to `b` while it waits, filled from `b` to `c` while it works. A wait
// beside the others holds nobody up and is left out. What is not on the critical path is faded
// while that stands out.
function drawTask(state, i, top, height, a, b, c) {
  const { context, data, meta, look } = state;
  const op = meta.ops[data.op[i]];
  const fades = state.path && !state.index.onPath[i] && i !== state.selected;
  context.globalAlpha = fades ? 0.3 : 1;
  if (b - a > 0.3 && !data.beside[i]) {
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
  if (w >= 12 && height >= 11) {
    context.font = FONT;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = op.ink;
    context.fillText(w >= 74 ? op.name : op.letter, b + w / 2, top + height / 2 + 0.5);
  }
  context.globalAlpha = 1;
}

// The loader's strip: from the moment the task before was issued to the moment this one was.
function drawLoader(state, lane, top, x) {
  const { context, data, meta, look } = state;
  let before = 0;
  for (let i = lane[0]; i < lane[1] && before < state.t1; i++) {
    const until = data.issued[i];
    if (until < 0 || data.beside[i]) continue;
    if (meta.ops[data.op[i]].streams && until > state.t0) {
      const a = Math.max(x(before), GUTTER),
        b = Math.min(x(until), state.width);
      context.fillStyle = look.ops[data.op[i]];
      context.fillRect(a, top, Math.max(b - a, 0.5), LOADER);
    }
    before = until;
  }
}

function outlineSelected(state, x) {
  const { context, data, selected } = state;
  const { panel } = state.places[data.laneOf(selected)];
  // Beside the others nothing is drawn of a wait.
  const since = data.beside[selected] ? data.ready[selected] : data.begin[selected];
  const a = Math.max(x(since), GUTTER),
    b = Math.min(x(data.end[selected]), state.width);
  if (b < a) return;
  const { top, height } = barOf(state, selected);
  inside(state, panel, () => {
    context.lineWidth = 3;
    context.strokeStyle = "#000000";
    context.strokeRect(a - 1, top, Math.max(b - a, 2) + 2, height);
  });
}
