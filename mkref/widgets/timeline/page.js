// The page: elements, keys (those of Perfetto), mouse, and what is shared with Python.

const HELP = [
  ["W S", "zoom in, out"],
  ["A D", "pan left, right"],
  [". ,", "next, previous task of the SM"],
  ["↑ ↓", "the SM above, below"],
  ["F", "fit the selected task"],
  ["0", "the whole step"],
  ["L", "loader strips on, off"],
  ["V", "all SMs at once, or rows with letters"],
  ["Esc", "select nothing"],
  ["?", "this list"],
  ["mouse", "click selects, drag pans, Ctrl + wheel zooms, wheel scrolls the rows"],
];

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
  // JupyterLab's own one-letter shortcuts (A inserts a cell) must not fire here.
  const stage = element(root, "div", {
    class: "stage",
    tabindex: "0",
    role: "application",
    "data-lm-suppress-shortcuts": "true",
    "aria-label": `Timeline. ${meta.summary} Press ? for the keys.`,
  });
  const legendPlace = element(stage, "div");
  const canvas = element(stage, "canvas", {
    class: "rows",
    role: "img",
    "aria-label": meta.summary,
  });
  const context = canvas.getContext("2d");
  const look = looks(context, meta);
  const data = unpack(meta, model.get("tasks"));
  const state = {
    meta,
    data,
    canvas,
    context,
    look,
    selected: model.get("selected"),
    t0: 0,
    t1: Math.max(meta.span_ns * 1.02, MIN_SPAN),
    scroll: 0,
    width: 0,
    loader: true,
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
    const { begin, end } = data,
      i = state.selected;
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
    w: () => zoom(state, 0.7),
    s: () => zoom(state, 1 / 0.7),
    a: () => pan(state, -0.2),
    d: () => pan(state, 0.2),
    arrowleft: () => pan(state, -0.2),
    arrowright: () => pan(state, 0.2),
    ".": () => step(1),
    ",": () => step(-1),
    f: fit,
    0: whole,
    l: toggleLoader,
    v: () => setRows(state, !state.compact),
    escape: () => select(-1),
    "?": toggleHelp,
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
    drag = {
      x: event.offsetX,
      y: event.offsetY,
      t0: state.t0,
      t1: state.t1,
      scroll: state.scroll,
      moved: false,
    };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const dx = event.offsetX - drag.x,
      dy = event.offsetY - drag.y;
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
  canvas.addEventListener(
    "wheel",
    (event) => {
      const at =
        state.t0 + ((event.offsetX - GUTTER) / (state.width - GUTTER - 8)) * (state.t1 - state.t0);
      if (event.ctrlKey || event.metaKey) {
        zoom(state, Math.exp(event.deltaY * 0.003), at);
      } else if (state.row * meta.n_sm > state.rowsHeight + 1) {
        setScroll(state, state.scroll + event.deltaY);
      } else {
        return; // nothing to scroll here: the page scrolls
      }
      event.preventDefault();
    },
    { passive: false },
  );

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
