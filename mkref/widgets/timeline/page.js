// The page: elements, keys (those of Perfetto), mouse, and what is shared with Python.

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
  const data = unpack(meta, model.get("tasks"));
  const state = {
    meta,
    data,
    canvas,
    context,
    look: looks(context, meta),
    index: indexEdges(meta, data),
    selected: -1,
    t0: 0,
    t1: Math.max(meta.span_ns * 1.02, MIN_SPAN),
    scroll: 0,
    width: 0,
    loader: true,
    edges: true,
    path: model.get("path"),
    apart: false,
  };
  legend(legendPlace, meta, state.look);

  const bar = element(stage, "div", { class: "bar", role: "toolbar", "aria-label": "view" });
  const detail = element(stage, "p", { class: "detail", "aria-live": "polite" });
  const edgesLine = element(stage, "p", { class: "edges" });
  const pathLine = element(stage, "p", { class: "path", "aria-live": "polite" });
  const help = helpBox(stage, meta);
  // Tables are written and escaped by widgets/figure.py.
  folded(root, "The same as a table", (place) => (place.innerHTML = meta.table));
  const refreshEdges = folded(root, "Edges of the selected task as a table", (place) =>
    fillEdges(state, place),
  );
  folded(root, "The critical path as a table", (place) => {
    place.textContent = "";
    for (const run of meta.runs) {
      if (twoRuns(meta)) element(place, "p", {}, `${run.letter}: ${run.title}`);
      element(place, "div").innerHTML = run.path_table;
    }
  });
  element(root, "p", {}, meta.summary);

  const select = (i, tell = true) => {
    state.selected = Math.min(i, data.n - 1);
    const task = state.selected < 0 ? -1 : data.task[state.selected];
    detail.textContent = words(state);
    edgesLine.textContent = edgeWords(state, state.selected);
    stage.dataset.selected = task;
    refreshEdges();
    if (state.selected >= 0) reveal(state);
    draw(state);
    if (tell && model.get("selected") !== task) {
      model.set("selected", task);
      model.save_changes();
    }
  };
  const step = (by) => {
    if (data.n === 0) return;
    if (state.selected < 0) return select(0);
    const lane = data.lanes[data.laneOf(state.selected)];
    select(Math.min(Math.max(state.selected + by, lane[0]), lane[1] - 1));
  };
  const fit = () => {
    if (state.selected < 0) return setWindow(state, 0, Infinity);
    const { begin, end } = data,
      i = state.selected;
    const air = (end[i] - begin[i]) * 0.5;
    setWindow(state, begin[i] - air, end[i] + air);
  };
  // A button that is on or off; `change` gets the new value.
  const toggle = (name, change) => () => {
    state[name] = !state[name];
    buttons[name].setAttribute("aria-pressed", state[name]);
    change(state[name]);
    draw(state);
  };
  const nothing = () => {};
  const showPath = () => {
    const said = meta.runs.map((run) => (twoRuns(meta) ? `${run.letter}: ` : "") + run.path_text);
    pathLine.textContent = state.path ? said.join(" ") : "";
  };
  const actions = {
    loader: toggle("loader", nothing),
    edges: toggle("edges", nothing),
    path: toggle("path", (on) => {
      showPath();
      model.set("path", on);
      model.save_changes();
    }),
    apart: toggle("apart", () => setRows(state, state.compact)),
    help: () => {
      help.hidden = !help.hidden;
      buttons.help.setAttribute("aria-pressed", !help.hidden);
    },
  };
  const along = (forward) => () => {
    if (state.selected < 0) return select(meta.runs[0].path[0] ?? -1);
    select(follow(state, forward));
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
    "[": along(false),
    "]": along(true),
    f: fit,
    0: whole,
    c: actions.path,
    e: actions.edges,
    l: actions.loader,
    v: () => {
      setRows(state, !state.compact);
      if (state.selected >= 0) reveal(state);
    },
    escape: () => select(-1),
    "?": actions.help,
    arrowup: () => (state.selected < 0 ? step(1) : select(neighbour(state, -1))),
    arrowdown: () => (state.selected < 0 ? step(1) : select(neighbour(state, 1))),
  };
  if (twoRuns(meta)) {
    keys.b = actions.apart;
    keys.o = () => state.selected >= 0 && data.twin[state.selected] >= 0 && select(data.twin[state.selected]);
  }
  stage.addEventListener("keydown", (event) => {
    // A button in the bar keeps Enter and Space, which are not among the keys.
    const action = keys[event.key.toLowerCase()];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });

  const button = (text, label, action, pressed) => {
    const b = element(bar, "button", { type: "button", "aria-label": label, title: label }, text);
    if (pressed !== undefined) b.setAttribute("aria-pressed", pressed);
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
  const buttons = {
    loader: button("loader", "loader strips (L)", actions.loader, state.loader),
    edges: button("edges", "edges of the selected task (E)", actions.edges, state.edges),
    path: button("critical path", "critical path (C)", actions.path, state.path),
  };
  if (twoRuns(meta))
    buttons.apart = button("two panels", "a panel for each run (B)", actions.apart, state.apart);
  button("for Perfetto", "save a file for ui.perfetto.dev", () => model.send({ type: "perfetto" }));
  buttons.help = button("keys", "list of keys (?)", actions.help, false);
  listenToMouse(state, stage, select);

  const onSelected = () => {
    const task = model.get("selected");
    if (Number(stage.dataset.selected) !== task) select(data.rowOfTask.get(task) ?? -1, false);
  };
  const onPath = () => model.get("path") !== state.path && actions.path();
  const onFile = (content, buffers) => {
    if (content.type === "perfetto") saveFile(content.name, buffers[0]);
  };
  model.on("change:selected", onSelected);
  model.on("change:path", onPath);
  model.on("msg:custom", onFile);
  setRows(state, meta.n_sm * meta.runs.length * TALL > MAX_HEIGHT);
  showPath();
  select(data.rowOfTask.get(model.get("selected")) ?? -1, false);
  const watcher = new ResizeObserver(() => draw(state));
  watcher.observe(canvas);
  return () => {
    watcher.disconnect();
    model.off("change:selected", onSelected);
    model.off("change:path", onPath);
    model.off("msg:custom", onFile);
  };
}

export default { render };
