// The SM timeline in the browser: one row per SM, one bar per task, hatched where the SM waits.
//
// It draws what `widget.py` packs (one int32 array) on a canvas, because tens of thousands of bars are too many
// for SVG elements. No library, no network. Keys are those of Perfetto: W S zoom, A D pan, . , next and previous task.
// Parts: 1 data   2 looks   3 drawing   4 moving   5 words   6 the page

const GUTTER = 64; // pixels on the left for "SM 12"
const AXIS = 26; // pixels below the rows for times
const MAX_HEIGHT = 480; // of all rows; more rows scroll
const TALL = 22; // row height at which letters fit
const LOADER = 4; // height of the loader's strip inside a row
const MIN_SPAN = 100; // ns: the closest zoom

// ------------------------------------------------------------------------------------------------ 1 data

// Columns of the packed array by name, times in ns, and per SM the range of its tasks (they lie SM after SM).
function unpack(meta, view) {
  const n_fields = meta.fields.length;
  const words = new Int32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
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
  return data;
}

// First task of a lane that ends after `t`.
function firstAfter(data, lane, t) {
  let [low, high] = lane;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.end[middle] > t) high = middle;
    else low = middle + 1;
  }
  return low;
}

// ----------------------------------------------------------------------------------------------- 2 looks

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
    op.pattern === "plain" ? op.fill : pattern(context, op.fill, meta.patterns[op.pattern], "#00000055"));
  return { wait, ops };
}

function formatNs(ns) {
  const round = (v) => String(Number(v.toPrecision(3)));
  if (ns >= 999.5e6) return `${round(ns / 1e9)} s`;
  if (ns >= 999.5e3) return `${round(ns / 1e6)} ms`;
  if (ns >= 999.5) return `${round(ns / 1e3)} us`;
  return `${Math.round(ns)} ns`;
}

// --------------------------------------------------------------------------------------------- 3 drawing

function draw(state) {
  const { canvas, context, data, meta, look } = state;
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = state.rowsHeight + AXIS;
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
  for (let k = 0; span / step > state.width / 110; k++) step = [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3);
  context.font = "11px DejaVu Sans, Verdana, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (let t = Math.ceil(state.t0 / step) * step; t <= state.t1; t += step) {
    context.fillStyle = meta.colors.grid;
    context.fillRect(x(t), 0, 1, state.rowsHeight + 5);
    context.fillStyle = meta.colors.ink;
    context.fillText(formatNs(t), x(t), state.rowsHeight + 18);
  }
}

function drawLane(state, sm, top, x) {
  const { context, data, meta, look } = state;
  const lane = data.lanes[sm];
  const strip = state.loader && state.row > 10 ? LOADER + 1 : 0;
  const gap = state.row > 8 ? 3 : state.row > 3 ? 1 : 0;
  const height = state.row - gap - strip;
  let drawnTo = -1; // bars below half a pixel at the same place are drawn once
  context.lineWidth = 0.5;
  for (let i = firstAfter(data, lane, state.t0); i < lane[1] && data.begin[i] < state.t1; i++) {
    const a = Math.max(x(data.begin[i]), GUTTER), b = Math.max(x(data.ready[i]), GUTTER);
    const c = Math.min(Math.max(x(data.end[i]), GUTTER), state.width);
    if (c - a < 0.5 && c < drawnTo + 0.5 && i !== state.selected) continue;
    drawnTo = c;
    if (b - a > 0.3) {
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
      const op = meta.ops[data.op[i]];
      const name = w >= 74 ? op.name : op.letter;
      context.font = "11px DejaVu Sans, Verdana, sans-serif";
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillStyle = op.ink;
      context.fillText(name, b + w / 2, top + height / 2 + 0.5);
    }
  }
  if (strip) drawLoader(state, lane, top + height + 1, x);
  if (state.selected >= lane[0] && state.selected < lane[1]) outlineSelected(state, top, height, x);
  if (state.row >= 11 || sm % Math.ceil(12 / state.row) === 0) {
    context.fillStyle = meta.colors.ink;
    context.font = "11px DejaVu Sans, Verdana, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(`SM ${sm}`, GUTTER - 8, top + state.row / 2 - 1);
  }
}

// The loader's strip: from the moment the task before was issued to the moment this one was.
function drawLoader(state, lane, top, x) {
  const { context, data, meta, look } = state;
  let before = 0;
  for (let i = lane[0]; i < lane[1] && before < state.t1; i++) {
    const until = data.issued[i];
    if (until < 0) continue;
    if (meta.ops[data.op[i]].streams && until > state.t0) {
      const a = Math.max(x(before), GUTTER), b = Math.min(x(until), state.width);
      context.fillStyle = look.ops[data.op[i]];
      context.fillRect(a, top, Math.max(b - a, 0.5), LOADER);
    }
    before = until;
  }
}

function outlineSelected(state, top, height, x) {
  const { context, data, selected } = state;
  const a = Math.max(x(data.begin[selected]), GUTTER), b = Math.min(x(data.end[selected]), state.width);
  if (b < a) return;
  context.lineWidth = 3;
  context.strokeStyle = "#000000";
  context.strokeRect(a - 1, top, Math.max(b - a, 2) + 2, height);
}

// ---------------------------------------------------------------------------------------------- 4 moving

// Keep the window inside the trace, a little air on the right.
function setWindow(state, t0, t1) {
  const most = Math.max(state.meta.span_ns * 1.02, MIN_SPAN);
  const span = Math.min(Math.max(t1 - t0, MIN_SPAN), most);
  state.t0 = Math.min(Math.max(t0, 0), most - span);
  state.t1 = state.t0 + span;
  draw(state);
}

function zoom(state, factor, at = (state.t0 + state.t1) / 2) {
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
  else if (top + state.row > state.scroll + state.rowsHeight) setScroll(state, top + state.row - state.rowsHeight);
}

function taskAt(state, px, py) {
  const sm = Math.floor((py + state.scroll) / state.row);
  if (px < GUTTER || py > state.rowsHeight || sm < 0 || sm >= state.meta.n_sm) return -1;
  const t = state.t0 + ((px - GUTTER) / (state.width - GUTTER - 8)) * (state.t1 - state.t0);
  const i = firstAfter(state.data, state.data.lanes[sm], t);
  return i < state.data.lanes[sm][1] && state.data.begin[i] <= t ? i : -1;
}

// The task that another SM was at when this one began.
function neighbour(state, by) {
  const { data, meta, selected } = state;
  const sm = Math.min(Math.max(data.sm[selected] + by, 0), meta.n_sm - 1);
  const lane = data.lanes[sm];
  return Math.min(firstAfter(data, lane, data.ready[selected]), lane[1] - 1);
}

// ----------------------------------------------------------------------------------------------- 5 words

function words(state) {
  const { data, meta, selected: i } = state;
  if (i < 0) return "No task selected. Click a bar, or press . for the first one; press ? for all keys.";
  const op = meta.ops[data.op[i]].name;
  const wait = data.ready[i] - data.begin[i];
  const on = data.wait[i] >= 0 ? ` for counter ${meta.counters[data.wait[i]]}` : "";
  const issued = data.issued[i] >= 0 && meta.ops[data.op[i]].streams
    ? `, its last copy was issued at ${formatNs(data.issued[i])}` : "";
  return `SM ${data.sm[i]}, ${op}, layer ${data.layer[i]}, first ${data.first[i]}, count ${data.count[i]}: ` +
    `seen at ${formatNs(data.begin[i])}, waited ${formatNs(wait)}${on}, ` +
    `worked ${formatNs(data.end[i] - data.ready[i])}, done at ${formatNs(data.end[i])}${issued}.`;
}

const HELP = [
  ["W S", "zoom in, out"], ["A D", "pan left, right"], [". ,", "next, previous task of the SM"],
  ["↑ ↓", "the SM above, below"], ["F", "fit the selected task"], ["0", "the whole step"],
  ["L", "loader strips on, off"], ["V", "all SMs at once, or rows with letters"], ["Esc", "select nothing"],
  ["? ", "this list"], ["mouse", "click selects, drag pans, Ctrl + wheel zooms, wheel scrolls the rows"],
];

// -------------------------------------------------------------------------------------------- 6 the page

function element(parent, tag, attributes = {}, text = "") {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.textContent = text;
  parent.append(e);
  return e;
}

function legend(parent, meta, look) {
  const list = element(parent, "ul", { class: "legend", "aria-label": "legend" });
  const entry = (name, fill, letter, ink) => {
    const item = element(list, "li");
    const swatch = element(item, "canvas", { width: 22, height: 15, "aria-hidden": "true" });
    const c = swatch.getContext("2d");
    c.fillStyle = fill;
    c.fillRect(0, 0, 22, 15);
    c.font = "11px DejaVu Sans, Verdana, sans-serif";
    c.textAlign = "center";
    c.fillStyle = ink;
    c.fillText(letter, 11, 12);
    element(item, "span", {}, name);
  };
  meta.ops.forEach((op, k) => entry(op.name, look.ops[k], op.letter, op.ink));
  entry("waits for inputs", look.wait, "", "#000000");
}

function render({ model, el }) {
  const meta = model.get("meta");
  const root = element(el, "div", { class: "mkref-timeline" });
  // JupyterLab's own one-letter shortcuts (A inserts a cell) must not fire while the timeline has the focus.
  const stage = element(root, "div", {
    class: "stage", tabindex: "0", role: "application", "data-lm-suppress-shortcuts": "true",
    "aria-label": `Timeline. ${meta.summary} Press ? for the keys.`,
  });
  const legendPlace = element(stage, "div");
  const canvas = element(stage, "canvas", { class: "rows", role: "img", "aria-label": meta.summary });
  const context = canvas.getContext("2d");
  const look = looks(context, meta);
  const data = unpack(meta, model.get("tasks"));
  const state = {
    meta, data, canvas, context, look, selected: model.get("selected"),
    t0: 0, t1: Math.max(meta.span_ns * 1.02, MIN_SPAN), scroll: 0, width: 0, loader: true,
  };
  legend(legendPlace, meta, look);

  const bar = element(stage, "div", { class: "bar" });
  const detail = element(stage, "p", { class: "detail", "aria-live": "polite" });
  const help = element(stage, "div", { class: "help" });
  help.hidden = true;
  for (const [keys, what] of HELP) {
    const line = element(help, "div");
    element(line, "kbd", {}, keys);
    line.append(` ${what}`);
  }
  const tableBox = element(root, "details");
  element(tableBox, "summary", {}, "The same as a table");
  element(tableBox, "div").innerHTML = meta.table; // written and escaped by widgets/figure.py
  element(root, "p", {}, meta.summary);

  const select = (i, tell = true) => {
    state.selected = Math.min(i, data.n - 1);
    detail.textContent = words(state);
    stage.dataset.selected = state.selected;
    if (state.selected >= 0) reveal(state);
    draw(state);
    if (tell && model.get("selected") !== state.selected) {
      model.set("selected", state.selected);
      model.save_changes();
    }
  };
  const step = (by) => {
    if (data.n === 0) return;
    if (state.selected < 0) return select(0);
    const lane = data.lanes[data.sm[state.selected]];
    select(Math.min(Math.max(state.selected + by, lane[0]), lane[1] - 1));
  };
  const fit = () => {
    if (state.selected < 0) return setWindow(state, 0, Infinity);
    const { begin, end } = data, i = state.selected;
    const air = (end[i] - begin[i]) * 0.5;
    setWindow(state, begin[i] - air, end[i] + air);
  };
  const toggleLoader = () => {
    state.loader = !state.loader;
    loaderButton.setAttribute("aria-pressed", state.loader);
    draw(state);
  };
  const toggleHelp = () => {
    help.hidden = !help.hidden;
    helpButton.setAttribute("aria-pressed", !help.hidden);
  };
  const whole = () => setWindow(state, 0, meta.span_ns * 1.02);
  const keys = {
    w: () => zoom(state, 0.7), s: () => zoom(state, 1 / 0.7), a: () => pan(state, -0.2), d: () => pan(state, 0.2),
    arrowleft: () => pan(state, -0.2), arrowright: () => pan(state, 0.2),
    ".": () => step(1), ",": () => step(-1), f: fit, 0: whole, l: toggleLoader,
    v: () => setRows(state, !state.compact), escape: () => select(-1), "?": toggleHelp,
    arrowup: () => (state.selected < 0 ? step(1) : select(neighbour(state, -1))),
    arrowdown: () => (state.selected < 0 ? step(1) : select(neighbour(state, 1))),
  };
  stage.addEventListener("keydown", (event) => {
    const action = keys[event.key.toLowerCase()];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });

  const button = (text, label, action) => {
    const b = element(bar, "button", { type: "button", "aria-label": label, title: label }, text);
    b.addEventListener("click", () => {
      action();
      stage.focus({ preventScroll: true });
    });
    return b;
  };
  button("+", "zoom in (W)", keys.w);
  button("\u2212", "zoom out (S)", keys.s);
  button("\u25c0", "pan left (A)", keys.a);
  button("\u25b6", "pan right (D)", keys.d);
  button("whole step", "show the whole step (0)", whole);
  button("all SMs", "all SMs at once, or rows with letters (V)", keys.v);
  const loaderButton = button("loader", "loader strips (L)", toggleLoader);
  loaderButton.setAttribute("aria-pressed", state.loader);
  const helpButton = button("keys", "list of keys (?)", toggleHelp);
  helpButton.setAttribute("aria-pressed", false);

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    stage.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, y: event.offsetY, t0: state.t0, t1: state.t1, scroll: state.scroll, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
    if (Math.abs(dx) + Math.abs(dy) < 4 && !drag.moved) return;
    drag.moved = true;
    canvas.classList.add("dragging");
    const by = (-dx / (state.width - GUTTER - 8)) * (drag.t1 - drag.t0);
    setWindow(state, drag.t0 + by, drag.t1 + by);
    setScroll(state, drag.scroll - dy);
  });
  canvas.addEventListener("pointerup", (event) => {
    canvas.classList.remove("dragging");
    if (drag && !drag.moved) select(taskAt(state, event.offsetX, event.offsetY));
    drag = null;
  });
  canvas.addEventListener("wheel", (event) => {
    const at = state.t0 + ((event.offsetX - GUTTER) / (state.width - GUTTER - 8)) * (state.t1 - state.t0);
    if (event.ctrlKey || event.metaKey) {
      zoom(state, Math.exp(event.deltaY * 0.003), at);
    } else if (state.row * meta.n_sm > state.rowsHeight + 1) {
      setScroll(state, state.scroll + event.deltaY);
    } else {
      return; // nothing to scroll here: the page scrolls
    }
    event.preventDefault();
  }, { passive: false });

  const onSelected = () => {
    if (model.get("selected") !== state.selected) select(model.get("selected"), false);
  };
  model.on("change:selected", onSelected);
  setRows(state, meta.n_sm * TALL > MAX_HEIGHT);
  select(state.selected, false);
  const watcher = new ResizeObserver(() => draw(state));
  watcher.observe(canvas);
  return () => {
    watcher.disconnect();
    model.off("change:selected", onSelected);
  };
}

export default { render };
