// A stage: shows the picture that Python draws, and tells Python which key, button, slider or place
// in the picture was chosen. No library, no network.

const KEY_NAMES = {
  arrowup: "\u2191",
  arrowdown: "\u2193",
  arrowleft: "\u2190",
  arrowright: "\u2192",
  escape: "Esc",
  enter: "Enter",
};

function helpBox(parent, meta) {
  const help = element(parent, "div", { class: "help" });
  help.hidden = true;
  const line = (key, text) => {
    const row = element(help, "div");
    element(row, "kbd", {}, KEY_NAMES[key] || key.toUpperCase());
    row.append(` ${text}`);
  };
  for (const action of meta.actions) line(action.key, action.text);
  line("?", "this list");
  if (meta.mouse) line("mouse", meta.mouse);
  return help;
}

function render({ model, el }) {
  const meta = model.get("meta");
  const root = element(el, "div", { class: "mkref-stage" });
  // JupyterLab's own one-letter shortcuts (A inserts a cell) must not fire here.
  const stage = element(root, "div", {
    class: "stage",
    tabindex: "0",
    role: "application",
    "data-lm-suppress-shortcuts": "true",
    "aria-label": `${meta.name}. Press ? for the keys.`,
  });
  const image = element(stage, "img", { class: "picture", alt: "", draggable: "false" });
  const sliders = element(stage, "div", { class: "sliders" });
  const bar = element(stage, "div", { class: "bar", role: "toolbar", "aria-label": meta.name });
  const help = helpBox(stage, meta);
  const said = element(root, "p", { class: "said", "aria-live": "polite" });
  const tables = element(root, "div");
  let regions = [];

  const tell = (name, value = 0) => model.send({ do: name, value });
  const buttons = {};
  const button = (name, text, label, action) => {
    const b = element(bar, "button", { type: "button", "aria-label": label, title: label }, text);
    b.addEventListener("click", () => {
      action();
      stage.focus({ preventScroll: true });
    });
    buttons[name] = b;
  };
  const keys = {};
  for (const action of meta.actions) {
    keys[action.key] = () => tell(action.name);
    if (!action.button) continue;
    const key = KEY_NAMES[action.key] || action.key.toUpperCase();
    button(action.name, action.button, `${action.text} (${key})`, keys[action.key]);
  }
  keys["?"] = () => {
    help.hidden = !help.hidden;
    buttons["?"].setAttribute("aria-pressed", !help.hidden);
  };
  button("?", "keys", "list of keys (?)", keys["?"]);
  buttons["?"].setAttribute("aria-pressed", false);

  const ranges = {};
  for (const range of meta.ranges) {
    const label = element(sliders, "label", {}, `${range.label} `);
    const input = element(label, "input", { type: "range", min: 0, max: range.most, step: 1 });
    const shown = element(label, "output");
    input.addEventListener("input", () => {
      shown.textContent = input.value;
      tell(range.name, Number(input.value));
    });
    ranges[range.name] = { input, shown };
  }

  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key.toLowerCase();
    // Sliders keep the arrows, buttons keep Enter: they are their own keys.
    const tag = event.target.tagName;
    if (tag === "INPUT" && key.startsWith("arrow")) return event.stopPropagation();
    if (tag === "BUTTON" && key === "enter") return event.stopPropagation();
    if (!keys[key]) return;
    event.preventDefault();
    event.stopPropagation();
    keys[key]();
  });

  // The last region that holds a point lies on top.
  const regionAt = (event) => {
    const x = (event.offsetX / image.clientWidth) * image.naturalWidth;
    const y = (event.offsetY / image.clientHeight) * image.naturalHeight;
    return regions.findLast(([a, b, w, h]) => x >= a && x <= a + w && y >= b && y <= b + h);
  };
  image.addEventListener("click", (event) => {
    stage.focus({ preventScroll: true });
    const region = regionAt(event);
    if (!region) return;
    const [name, value] = region[4].split(" ");
    tell(name, Number(value));
  });
  image.addEventListener("pointermove", (event) => {
    image.style.cursor = regionAt(event) ? "pointer" : "default";
  });

  const onView = () => {
    const view = model.get("view");
    regions = view.regions;
    image.src = view.image;
    image.alt = view.said;
    said.textContent = view.said;
    // Tables are written and escaped by widgets/figure.py. What is open stays open.
    view.tables.forEach(([name, html], k) => {
      let box = tables.children[k];
      if (!box) {
        box = element(tables, "details");
        element(box, "summary", {}, name);
        element(box, "div", { class: "scrolls" });
      }
      box.lastChild.innerHTML = html;
    });
    for (const [name, on] of Object.entries(view.pressed))
      buttons[name]?.setAttribute("aria-pressed", on);
    for (const [name, at] of Object.entries(view.positions)) {
      ranges[name].input.value = at;
      ranges[name].shown.textContent = at;
    }
    stage.dataset.shown = view.number;
  };
  model.on("change:view", onView);
  onView();
  return () => model.off("change:view", onView);
}

export default { render };
