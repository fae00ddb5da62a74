// A new element of the page; in front of the script of each live widget.
function element(parent, tag, attributes = {}, text = "") {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.textContent = text;
  parent.append(e);
  return e;
}
