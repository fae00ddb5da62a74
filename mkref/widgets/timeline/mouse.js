// The mouse: click selects, drag pans, the wheel zooms with Ctrl and scrolls without.

function listenToMouse(state, stage, select) {
  const { canvas } = state;
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
      } else if (state.contentHeight > state.panels[0].height + 1) {
        setScroll(state, state.scroll + event.deltaY);
      } else {
        return; // nothing to scroll here: the page scrolls
      }
      event.preventDefault();
    },
    { passive: false },
  );
}
