"use strict";
const $ = (id) => document.getElementById(id);

// ---- Nodes. What comes from the service only ever becomes text or an attribute's value.
const makerOf =
  (namespace) =>
  (tag, attributes = {}, ...children) => {
    const node = document.createElementNS(namespace, tag);
    for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
    node.append(...children.flat(Infinity).filter((child) => child != null));
    return node;
  };
const h = makerOf("http://www.w3.org/1999/xhtml"),
  svg = makerOf("http://www.w3.org/2000/svg");
// Change only what differs: hover, selection, focus and scroll positions outlive an update.
function show(parent, ...children) {
  children = children
    .flat(Infinity)
    .filter((child) => child != null)
    .map((c) => (c instanceof Node ? c : document.createTextNode(c)));
  const before = [...parent.childNodes];
  before.slice(children.length).forEach((node) => node.remove());
  children.forEach((next, i) => {
    const old = before[i];
    if (!old) return parent.append(next);
    if (old.nodeName !== next.nodeName) return old.replaceWith(next);
    if (old.nodeType === Node.TEXT_NODE) return old.data === next.data || (old.data = next.data);
    for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    show(old, [...next.childNodes]);
  });
}
