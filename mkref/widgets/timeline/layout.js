// Where lanes lie: panels of rows that scroll together. One run, or two over one another, make one
// panel; two runs apart make a panel each.

function layOut(state) {
  const { meta } = state;
  const n = meta.runs.length;
  const apart = n > 1 && state.apart;
  const sms = Array.from({ length: meta.n_sm }, (_, sm) => sm);
  const runs = meta.runs.map((_, run) => run);
  const lane = (run, sm) => run * meta.n_sm + sm;
  const lists = apart
    ? runs.map((run) => sms.map((sm) => lane(run, sm)))
    : [sms.flatMap((sm) => runs.map((run) => lane(run, sm)))];
  const rows = lists[0].length;
  const room = MAX_HEIGHT / lists.length;
  state.row = state.compact ? Math.max(Math.min(TALL, room / rows), 1) : TALL;
  const height = Math.min(room, state.row * rows);
  let top = 0;
  state.panels = lists.map((lanes, k) => {
    const panel = { lanes, run: apart ? k : -1, top: top + (apart ? TITLE : 0), height };
    top = panel.top + height;
    return panel;
  });
  state.rowsHeight = top;
  state.contentHeight = state.row * rows;
  // Per lane: its panel, and its place in the panel's list.
  state.places = [];
  state.panels.forEach((panel) =>
    panel.lanes.forEach((l, k) => (state.places[l] = { panel, k })),
  );
}

// Heights of the parts of a row: bars, lane of what ran beside, loader's strip; 0 for none.
function rowParts(state) {
  const gap = state.row > 8 ? 3 : state.row > 3 ? 1 : 0;
  const side = state.data.hasSides && state.row > 10 ? SIDE : 0;
  const strip = state.loader && state.row > 10 ? LOADER + 1 : 0;
  return { bars: state.row - gap - strip - side, side, strip };
}

// Top of a lane's row on the canvas; it may lie outside of its panel.
function topOf(state, lane) {
  const { panel, k } = state.places[lane];
  return panel.top + k * state.row - state.scroll;
}

// Where a task's bar is: top and height.
function barOf(state, i) {
  const { data } = state;
  const top = topOf(state, data.laneOf(i));
  const { bars, side } = rowParts(state);
  return data.beside[i] && side ? { top: top + bars + 1, height: side - 1 } : { top, height: bars };
}

// Whether the row of a task is scrolled into its panel.
function inSight(state, i) {
  const lane = state.data.laneOf(i);
  const { panel } = state.places[lane];
  const top = topOf(state, lane);
  return top + state.row > panel.top && top < panel.top + panel.height;
}

// The lane at a height of the canvas, or -1.
function laneAt(state, py) {
  for (const panel of state.panels) {
    if (py < panel.top || py >= panel.top + panel.height) continue;
    const k = Math.floor((py - panel.top + state.scroll) / state.row);
    if (k < panel.lanes.length) return panel.lanes[k];
  }
  return -1;
}

function timeToX(state, t) {
  return GUTTER + ((t - state.t0) / (state.t1 - state.t0)) * (state.width - GUTTER - 8);
}
