// Who waits for whom: the edges of the selected task, in lines and in words, and the critical path.
// The rules are those of edges.py, which computes causes and path; the words are its words.

const FEW_EDGES = 16;

// Tasks by the counter that they signal and by the one that they wait for, routers and users of
// experts by layer; all per run.
function indexEdges(meta, data) {
  const index = { signals: new Map(), waits: new Map(), routers: new Map(), routed: new Map() };
  const add = (map, run, key, i) => {
    const name = `${run} ${key}`;
    if (!map.has(name)) map.set(name, []);
    map.get(name).push(i);
  };
  for (let i = 0; i < data.n; i++) {
    const op = meta.ops[data.op[i]];
    if (data.signal[i] >= 0) add(index.signals, data.run[i], data.signal[i], i);
    if (data.wait[i] >= 0) add(index.waits, data.run[i], data.wait[i], i);
    if (op.router) add(index.routers, data.run[i], data.layer[i], i);
    if (op.routed) add(index.routed, data.run[i], data.layer[i], i);
  }
  index.onPath = new Uint8Array(data.n);
  for (const run of meta.runs) for (const i of run.path) index.onPath[i] = 1;
  return index;
}

function tasksOf(map, run, key) {
  return map.get(`${run} ${key}`) || [];
}

// What a task needs, in the order in which it ended; and what needs it, in the order of starts.
function edgesOf(state, i) {
  const { data, meta, index } = state;
  const op = meta.ops[data.op[i]];
  const run = data.run[i];
  const inOrder = (tasks, time) => [...tasks].sort((a, b) => time[a] - time[b] || a - b);
  const needs = data.wait[i] >= 0 ? [...tasksOf(index.signals, run, data.wait[i])] : [];
  if (op.routed) needs.push(...tasksOf(index.routers, run, data.layer[i]));
  const waiting = data.signal[i] >= 0 ? [...tasksOf(index.waits, run, data.signal[i])] : [];
  if (op.router) waiting.push(...tasksOf(index.routed, run, data.layer[i]));
  return { needs: inOrder(needs, data.end), waiting: inOrder(waiting, data.ready) };
}

// The task before another in the list that it ran in, or -1.
function before(data, i) {
  const list = (data.beside[i] ? data.sides : data.turns)[data.laneOf(i)];
  return list[list.indexOf(i) - 1] ?? -1;
}

function edgeWords(state, i) {
  if (i < 0) return "";
  const { data, meta } = state;
  const name = (k) => meta.ops[data.op[k]].name;
  const place = (k, time) => `${name(k)} on SM ${data.sm[k]}, at ${formatNs(time[k])}`;
  const counted = (tasks) => {
    const ops = new Map();
    for (const k of tasks) ops.set(data.op[k], (ops.get(data.op[k]) || 0) + 1);
    return [...ops].sort((a, b) => a[0] - b[0]).map(([op, n]) => `${n} ${meta.ops[op].name}`).join(", ");
  };
  const { needs, waiting } = edgesOf(state, i);
  const last = needs.at(-1);
  const cause = data.cause[i];
  const parts = [
    needs.length
      ? `It waited for ${counted(needs)}; the last was ${place(last, data.end)}.`
      : "It waited for no other task.",
  ];
  if (cause < 0) parts.push("Nothing held it up.");
  else if (cause === before(data, i)) parts.push(`Held up by its turn: ${place(cause, data.end)}.`);
  else parts.push(`Held up by ${place(cause, data.end)}.`);
  parts.push(
    waiting.length
      ? `Waiting for it: ${counted(waiting)}; the first to start was ${place(waiting[0], data.ready)}.`
      : "No other SM waits for it.",
  );
  return parts.join(" ");
}

// Every edge of the selected task as rows of a table: [direction, task, SM, when].
function edgeRows(state, i) {
  if (i < 0) return [];
  const { data, meta } = state;
  const { needs, waiting } = edgesOf(state, i);
  const row = (what, k, verb, time) => [
    what,
    meta.ops[data.op[k]].name,
    `SM ${data.sm[k]}`,
    `${verb} at ${formatNs(time[k])}`,
  ];
  return [
    ...needs.map((k) => row("waited for", k, "done", data.end)),
    ...waiting.map((k) => row("waiting for it", k, "started", data.ready)),
  ];
}

// A dark line, on request with a light edge, so that it is seen over any colour.
function edgeLine(context, points, width, dash = [], edge = true) {
  const stroke = (style, lineWidth, pattern) => {
    context.strokeStyle = style;
    context.lineWidth = lineWidth;
    context.setLineDash(pattern);
    context.beginPath();
    points.forEach(([x, y], k) => (k ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.stroke();
  };
  if (edge) stroke("#ffffff", width + 2, []);
  stroke("#1a1a1a", width, dash);
  context.setLineDash([]);
}

function hop(state, a, b, width, dash, edge) {
  const { context, data } = state;
  const t = [data.end[a], data.ready[b]];
  if (Math.max(...t) < state.t0 || Math.min(...t) > state.t1) return;
  const [from, to] = [barOf(state, a), barOf(state, b)];
  const x = [timeToX(state, t[0]), timeToX(state, t[1])];
  const y = [from.top + from.height / 2, to.top + to.height / 2];
  edgeLine(context, [[x[0], y[0]], [x[1], y[1]]], width, dash, edge);
}

function clipped(state, work) {
  const { context } = state;
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, state.width - GUTTER, state.rowsHeight);
  context.clip();
  work();
  context.restore();
}

function drawPath(state) {
  const { context, data, meta } = state;
  if (!state.path) return;
  clipped(state, () => {
    for (const run of meta.runs)
      for (const i of run.path) if (data.cause[i] >= 0) hop(state, data.cause[i], i, 1.5);
    context.strokeStyle = "#000000";
    context.lineWidth = state.row > 8 ? 2 : 1.5;
    for (const run of meta.runs)
      for (const i of run.path) {
        if (data.end[i] < state.t0 || data.ready[i] > state.t1) continue;
        const [a, b] = [timeToX(state, data.ready[i]), timeToX(state, data.end[i])];
        const { top, height } = barOf(state, i);
        context.strokeRect(a, top, Math.max(b - a, 0.5), height);
      }
  });
}

// Solid from each task that it waited for, thick from what held it up, dashed to each that waits.
function drawEdges(state) {
  const { data, selected: i } = state;
  if (i < 0 || !state.edges) return;
  const { needs, waiting } = edgesOf(state, i);
  clipped(state, () => {
    // Of many, those that lead out of sight would hide the bars, and so would light edges.
    const few = (tasks) => tasks.length <= FEW_EDGES;
    const shown = (tasks) => (few(tasks) ? tasks : tasks.filter((k) => inSight(state, k)));
    for (const k of shown(needs)) hop(state, k, i, 1, [], few(needs));
    for (const k of shown(waiting)) hop(state, i, k, 1, [4, 3], few(waiting));
    if (data.cause[i] >= 0) hop(state, data.cause[i], i, 3);
  });
}
