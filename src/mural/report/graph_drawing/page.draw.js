// Drawing: the boxes that are seen, and the edges between them, as SVG. What is folded is not drawn.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function arrow(id) {
  const marker = element("marker", {
    id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto",
  });
  marker.append(element("path", { d: "M0 0L8 4L0 8z" }));
  return marker;
}

class Drawing {
  constructor(svg, model, layout, state) {
    Object.assign(this, { svg, model, layout, state });
    this.groups = new Map();
    this.nets = new Map();
  }

  // Draw everything that is seen; the size without zoom comes back.
  render() {
    this.groups.clear();
    this.nets.clear();
    const top = this.layout.of(0);
    const defs = element("defs");
    defs.append(arrow("arrow"), arrow("arrow-lit"));
    this.svg.replaceChildren(defs, this.box(0, SPACE.pad, SPACE.pad));
    this.size = { width: top.width + 2 * SPACE.pad, height: top.height + 2 * SPACE.pad };
    this.svg.setAttribute("viewBox", `0 0 ${this.size.width} ${this.size.height}`);
    this.mark();
    return this.size;
  }

  box(id, x, y) {
    const { width, height, title, at, nets } = this.layout.of(id);
    const { model } = this;
    const opened = this.state.isOpen(id);
    const group = element("g", { class: `box ${model.role[id]}`, "data-id": id, transform: `translate(${x} ${y})`, tabindex: -1, role: "treeitem" });
    group.setAttribute("aria-label", model.spoken(id));
    if (model.role[id] === "input" || model.role[id] === "output") group.classList.add("value");
    if (opened) group.classList.add("opened");
    if (model.refused[id]) group.classList.add("refused");
    if (model.children[id].length) group.setAttribute("aria-expanded", opened);
    if (model.children[id].length && !opened) {
      group.append(element("rect", { class: "behind", x: 4, y: 4, width, height, rx: SPACE.round }));
    }
    group.append(element("rect", { class: "body", width, height, rx: model.role[id] === "layer" ? SPACE.round : 2 * SPACE.round }));
    this.colour(group, id, height);
    this.groups.set(id, group);
    if (opened) for (const net of nets) group.append(this.net(id, net));
    if (opened) {
      group.append(this.title(id, "▾", title, 20, "start"));
      for (const child of model.children[id]) group.append(this.box(child, at.get(child).x, at.get(child).y));
    } else {
      const place = { class: "shape", x: width / 2, y: 36, "text-anchor": "middle" };
      group.append(this.title(id, "▸", width / 2, 19, "middle"), element("text", place, this.layout.label(id).below));
    }
    return group;
  }

  // A box in one stage has its colour; one in several has a strip with a piece for each, as long as its share of calls.
  colour(group, id, height) {
    const { model } = this;
    const inside = model.stagesOf(id);
    if (inside.length === 1) {
      group.classList.add("staged");
      group.style.setProperty("--hue", model.stages[inside[0].stage].hue);
    }
    const total = inside.reduce((sum, { calls }) => sum + calls, 0);
    let y = 0;
    for (const { stage, calls } of inside) {
      const part = ((height - 2 * SPACE.round) * calls) / total;
      const strip = element("rect", { class: "strip", x: 3, y: SPACE.round + y, width: 4, height: part, rx: 1.5 });
      strip.style.setProperty("--hue", model.stages[stage].hue);
      group.append(strip);
      y += part;
    }
  }

  title(id, fold, x, y, anchor) {
    const label = this.layout.label(id);
    const text = element("text", { x, y, "text-anchor": anchor });
    if (this.model.children[id].length) text.append(element("tspan", { class: "fold" }, `${fold} `));
    text.append(element("tspan", { class: "name" }, label.name), element("tspan", { class: "kind" }, label.kind));
    return text;
  }

  net(block, net) {
    const group = element("g", { class: "net", "data-origin": net.origin });
    const lines = net.paths.map(({ d, to, far, stem }) => {
      const readers = to === undefined ? net.targets : [to];
      const across = readers.some((target) => this.model.crosses(net.origin, target));
      const path = element("path", { d, class: `${to === undefined ? "" : "to"} ${across ? "across" : ""}` });
      group.append(path);
      return { path, to, far, stem };
    });
    if (!this.nets.has(net.origin)) this.nets.set(net.origin, new Map());
    this.nets.get(net.origin).set(block, { net, lines });
    return group;
  }

  // Show what is selected, found, or in the stage that was chosen, without drawing anew.
  mark() {
    const { selected, matches, stage } = this.state;
    this.svg.querySelectorAll("rect.found, text.found").forEach((old) => old.remove());
    const hidden = this.state.matchesInside();
    for (const [id, group] of this.groups) {
      group.classList.toggle("selected", id === selected);
      group.classList.toggle("match", matches.has(id));
      group.classList.toggle("dimmed", stage !== null && !this.model.stagesOf(id).some((inside) => inside.stage === stage));
      group.setAttribute("tabindex", id === selected ? 0 : -1);
      if (hidden.get(id) && !this.state.isOpen(id)) this.badge(group, id, hidden.get(id));
    }
    if (!this.groups.has(selected)) this.groups.get(0).setAttribute("tabindex", 0);
    this.svg.querySelectorAll(".lit").forEach((path) => path.classList.remove("lit"));
    if (selected) for (const path of this.linesOf(selected)) path.classList.add("lit");
  }

  badge(group, id, count) {
    const { width } = this.layout.of(id);
    const half = 8 + 3.5 * String(count).length;
    group.append(element("rect", { class: "found", x: width - half - 6, y: -8, width: 2 * half, height: 16, rx: 8 }));
    group.append(element("text", { class: "found", x: width - 6, y: 4 }, count));
  }

  // The lines that lead to a box or away from it, also beyond the ports of the boxes around it.
  linesOf(id) {
    const found = [];
    const around = this.model.parent[id];
    for (const [origin, source, targets] of this.model.nets[around] ?? []) {
      const drawn = this.nets.get(origin);
      if (!drawn) continue;
      if (source === id) for (const [block, { lines }] of drawn) if (!this.model.isInside(block, id)) found.push(...lines);
      if (targets.includes(id)) found.push(...this.linesTo(id, drawn));
    }
    return found.map(({ path }) => path);
  }

  // The lines of a value that lead to one reader, from where it was made.
  linesTo(id, drawn) {
    const found = [];
    for (let to = id, block = this.model.parent[id]; block >= 0; to = block, block = this.model.parent[block]) {
      const { net, lines } = drawn.get(block);
      const branch = lines.find((line) => line.to === to);
      found.push(branch, ...lines.filter((line) => line.stem && branch.far));
      if (net.source >= 0) break;
    }
    return found;
  }
}
