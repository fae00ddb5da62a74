// Parts of the page that do not move: list of keys, legend, tables.

const HELP = [
  ["W S", "zoom in, out"],
  ["A D", "pan left, right"],
  [". ,", "next, previous task of the SM"],
  ["\u2191 \u2193", "the SM above, below"],
  ["[ ]", "what held the task up; what comes after it"],
  ["F", "fit the selected task"],
  ["0", "the whole step"],
  ["C", "critical path on, off"],
  ["E", "edges of the selected task on, off"],
  ["L", "loader strips on, off"],
  ["V", "all SMs at once, or rows with letters"],
  ["Esc", "select nothing"],
  ["?", "this list"],
  ["mouse", "click selects, drag pans, Ctrl + wheel zooms, wheel scrolls the rows"],
];
const HELP_TWO = [
  ["B", "both runs on each SM, or a panel for each"],
  ["O", "the same task in the other run"],
];

function helpBox(parent, meta) {
  const help = element(parent, "div", { class: "help" });
  help.hidden = true;
  const lines = [...HELP];
  if (twoRuns(meta)) lines.splice(-3, 0, ...HELP_TWO);
  for (const [keys, what] of lines) {
    const line = element(help, "div");
    element(line, "kbd", {}, keys);
    line.append(` ${what}`);
  }
  return help;
}

function legend(parent, meta, look) {
  const list = element(parent, "ul", { class: "legend", "aria-label": "legend" });
  const entry = (name, fill, letter, ink) => {
    const item = element(list, "li");
    const swatch = element(item, "canvas", { width: 22, height: 15, "aria-hidden": "true" });
    const c = swatch.getContext("2d");
    c.fillStyle = fill;
    c.fillRect(0, 0, 22, 15);
    c.font = FONT;
    c.textAlign = "center";
    c.fillStyle = ink;
    c.fillText(letter, 11, 12);
    element(item, "span", {}, name);
  };
  meta.ops.forEach((op, k) => entry(op.name, look.ops[k], op.letter, op.ink));
  entry("waits for inputs", look.wait, "", "#000000");
  if (!twoRuns(meta)) return;
  for (const run of meta.runs)
    element(element(list, "li", { class: "run" }), "span", {}, `${run.letter}: ${run.title}`);
}

// A table that is only filled while somebody looks at it.
function folded(root, name, fill) {
  const box = element(root, "details");
  element(box, "summary", {}, name);
  const place = element(box, "div", { class: "scrolls" });
  const refresh = () => {
    if (box.open) fill(place);
  };
  box.addEventListener("toggle", refresh);
  return refresh;
}

function fillEdges(state, place) {
  place.textContent = "";
  const rows = edgeRows(state, state.selected);
  if (rows.length === 0) {
    element(place, "p", {}, "No task is selected, or it has no edges.");
    return;
  }
  const table = element(place, "table");
  const head = element(element(table, "thead"), "tr");
  for (const name of ["edge", "task", "SM", "when"]) element(head, "th", { scope: "col" }, name);
  const body = element(table, "tbody");
  for (const cells of rows) {
    const line = element(body, "tr");
    cells.forEach((cell, k) => element(line, k ? "td" : "th", k ? {} : { scope: "row" }, cell));
  }
}

function saveFile(name, view) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([view], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
