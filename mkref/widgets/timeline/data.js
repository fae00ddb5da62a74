// The SM timeline in the browser: one row per SM, one bar per task, hatched where the SM waits.
// What ran beside the other tasks of its SM has a thin lane under them.
//
// `widget.py` joins data.js, draw.js, move.js and page.js, in this order, into the one module that
// anywidget loads, and packs the trace into one int32 array. Bars are drawn on a canvas: a step has
// tens of thousands of them, too many for SVG elements. No library, no network.
//
// This part: sizes, the trace, colours and patterns, and a task in words.

const GUTTER = 64; // pixels on the left for "SM 12"
const AXIS = 26; // pixels below the rows for times
const MAX_HEIGHT = 480; // of all rows; more rows scroll
const TALL = 26; // row height at which letters fit
const LOADER = 4; // height of the loader's strip inside a row
const SIDE = 5; // height of the lane of what ran beside
const MIN_SPAN = 100; // ns: the closest zoom

// Columns of the packed array by name, times in ns, and per SM the range of its tasks, which lie
// SM after SM; `turns` are those that ran one after another, `sides` those that ran beside them.
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
  data.lanes = Array.from({ length: meta.n_sm }, () => [n, n]);
  for (let i = n - 1; i >= 0; i--) {
    const lane = data.lanes[data.sm[i]];
    if (lane[0] === n && lane[1] === n) lane[1] = i + 1;
    lane[0] = i;
  }
  const beside = meta.ops.map((op) => op.beside);
  const pick = (side) =>
    data.lanes.map(([first, last]) => {
      const tasks = [];
      for (let i = first; i < last; i++) if (beside[data.op[i]] === side) tasks.push(i);
      return tasks;
    });
  data.turns = pick(false);
  data.sides = pick(true);
  data.hasSides = beside.includes(true);
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

// Heights of the parts of a row: bars, lane of what ran beside, loader's strip; 0 for none.
function rowParts(state) {
  const gap = state.row > 8 ? 3 : state.row > 3 ? 1 : 0;
  const side = state.data.hasSides && state.row > 10 ? SIDE : 0;
  const strip = state.loader && state.row > 10 ? LOADER + 1 : 0;
  return { bars: state.row - gap - strip - side, side, strip };
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
    `SM ${data.sm[i]}, ${op}, layer ${data.layer[i]}, first ${data.first[i]}, count ${data.count[i]}: ` +
    `seen at ${formatNs(data.begin[i])}, waited ${formatNs(wait)}${on}, ` +
    `worked ${formatNs(data.end[i] - data.ready[i])}, done at ${formatNs(data.end[i])}${issued}.`
  );
}
