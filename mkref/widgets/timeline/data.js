// The SM timeline in the browser: one row per SM, one bar per task, hatched where the SM waits.
// What ran beside the other tasks of its SM has a thin lane under them. Two runs share the picture:
// A and B over one another on every SM, or in two panels.
//
// `widget.py` joins data.js, layout.js, edges.js, draw.js, move.js, mouse.js, parts.js and page.js, in this
// order, into the one module that anywidget loads, and packs the runs into one int32 array. Bars
// are drawn on a canvas: a step has tens of thousands of them, too many for SVG elements. No
// library, no network.
//
// This part: sizes, the runs, colours and patterns, and a task in words.

const GUTTER = 70; // pixels on the left for "SM 131 A"
const AXIS = 26; // pixels below the rows for times
const MAX_HEIGHT = 480; // of all rows; more rows scroll
const TALL = 26; // row height at which letters fit
const TITLE = 18; // height of a panel's title
const LOADER = 4; // height of the loader's strip inside a row
const SIDE = 5; // height of the lane of what ran beside
const MIN_SPAN = 100; // ns: the closest zoom
const FONT = "11px DejaVu Sans, Verdana, sans-serif";

// Columns of the packed array by name, times in ns. A lane is an SM of a run, number
// run * n_sm + sm, with the range of its tasks, which lie lane after lane; `turns` are those that
// ran one after another, `sides` those that ran beside them.
function unpack(meta, view) {
  const n_fields = meta.fields.length;
  const words = new Int32Array(
    view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength),
  );
  const n = words.length / n_fields;
  const data = { n };
  meta.fields.forEach((name, f) => {
    const isTime = f >= n_fields - 4;
    data[name] = new Float64Array(n);
    for (let i = 0; i < n; i++) {
      const v = words[i * n_fields + f];
      data[name][i] = isTime && v >= 0 ? v * meta.unit_ns : v;
    }
  });
  data.laneOf = (i) => data.run[i] * meta.n_sm + data.sm[i];
  data.lanes = Array.from({ length: meta.n_sm * meta.runs.length }, () => [n, n]);
  data.rowOfTask = new Map();
  for (let i = n - 1; i >= 0; i--) {
    const lane = data.lanes[data.laneOf(i)];
    if (lane[0] === n && lane[1] === n) lane[1] = i + 1;
    lane[0] = i;
    data.rowOfTask.set(data.task[i], i);
  }
  const pick = (side) =>
    data.lanes.map(([first, last]) => {
      const tasks = [];
      for (let i = first; i < last; i++) if (data.beside[i] === side) tasks.push(i);
      return tasks;
    });
  data.turns = pick(0);
  data.sides = pick(1);
  data.hasSides = data.beside.includes(1);
  return data;
}

// Position of the first of some tasks, in the order of time, that ends after `t`.
function firstAfter(data, tasks, t) {
  let low = 0,
    high = tasks.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.end[tasks[middle]] > t) high = middle;
    else low = middle + 1;
  }
  return low;
}

function pattern(context, base, path, stroke) {
  const cell = document.createElement("canvas");
  cell.width = cell.height = 6;
  const c = cell.getContext("2d");
  c.fillStyle = base;
  c.fillRect(0, 0, 6, 6);
  c.strokeStyle = stroke;
  c.stroke(new Path2D(path));
  return context.createPattern(cell, "repeat");
}

function looks(context, meta) {
  const wait = pattern(context, "#ffffff", meta.patterns.diagonal, meta.colors.wait);
  const ops = meta.ops.map((op) =>
    op.pattern === "plain"
      ? op.fill
      : pattern(context, op.fill, meta.patterns[op.pattern], "#00000055"),
  );
  return { wait, ops };
}

function formatNs(ns) {
  const round = (v) => String(Number(v.toPrecision(3)));
  if (ns >= 999.5e6) return `${round(ns / 1e9)} s`;
  if (ns >= 999.5e3) return `${round(ns / 1e6)} ms`;
  if (ns >= 999.5) return `${round(ns / 1e3)} us`;
  return `${Math.round(ns)} ns`;
}

const twoRuns = (meta) => meta.runs.length > 1;
const letterOf = (state, i) => (twoRuns(state.meta) ? `${state.meta.runs[state.data.run[i]].letter}, ` : "");

function words(state) {
  const { data, meta, selected: i } = state;
  if (i < 0)
    return "No task selected. Click a bar, or press . for the first one; press ? for all keys.";
  const op = meta.ops[data.op[i]].name;
  const wait = data.ready[i] - data.begin[i];
  const on = data.wait[i] >= 0 ? ` for counter ${meta.counters[data.wait[i]]}` : "";
  const issued =
    data.issued[i] >= 0 && meta.ops[data.op[i]].streams
      ? `, its last copy was issued at ${formatNs(data.issued[i])}`
      : "";
  return (
    `${letterOf(state, i)}SM ${data.sm[i]}, ${op}, layer ${data.layer[i]}, first ${data.first[i]}, count ${data.count[i]}: ` +
    `seen at ${formatNs(data.begin[i])}, waited ${formatNs(wait)}${on}, ` +
    `worked ${formatNs(data.end[i] - data.ready[i])}, done at ${formatNs(data.end[i])}${issued}.` +
    twinWords(state, i)
  );
}

// The same task in the other run.
function twinWords(state, i) {
  const { data, meta } = state;
  if (!twoRuns(meta)) return "";
  const other = meta.runs[1 - data.run[i]].letter;
  const k = data.twin[i];
  if (k < 0) return ` ${other} has no such task.`;
  return (
    ` In ${other} it waited ${formatNs(data.ready[k] - data.begin[k])}, ` +
    `worked ${formatNs(data.end[k] - data.ready[k])}, done at ${formatNs(data.end[k])}.`
  );
}
