// Input: clicks, keys and the wheel, and the panel with what is known of the selected box.

Page.prototype.listen = function listen() {
  const on = (id, event, act) => document.getElementById(id).addEventListener(event, act);
  on("in", "click", () => this.zoomBy(1.25));
  on("out", "click", () => this.zoomBy(0.8));
  on("fit", "click", () => this.fit());
  on("next", "click", () => this.step(1));
  on("previous", "click", () => this.step(-1));
  on("query", "input", (event) => this.search(event.target.value));
  on("query", "keydown", (event) => this.searchKey(event));
  on("search", "submit", (event) => event.preventDefault());
  document.querySelectorAll("[data-level]").forEach((button) => button.addEventListener("click", () => this.openLevel(button.dataset.level)));
  document.addEventListener("keydown", (event) => this.key(event));
  this.drawing.svg.addEventListener("click", (event) => this.click(event));
  this.paper.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  this.paper.addEventListener("pointerdown", (event) => this.drag(event));
};

Page.prototype.click = function click(event) {
  const group = event.target.closest(".box");
  if (!group || this.dragged) return;
  this.toggle(Number(group.dataset.id));
};

Page.prototype.wheel = function wheel(event) {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const paper = this.paper.getBoundingClientRect();
  this.zoomBy(Math.exp(-event.deltaY / 400), event.clientX - paper.x, event.clientY - paper.y);
};

Page.prototype.drag = function drag(down) {
  this.dragged = false;
  if (down.button || down.pointerType === "touch") return;
  let { clientX: x, clientY: y } = down;
  const move = (event) => {
    if (!this.dragged && Math.hypot(event.clientX - x, event.clientY - y) < 4) return;
    this.dragged = true;
    this.paper.classList.add("dragged");
    this.paper.scrollBy(x - event.clientX, y - event.clientY);
    ({ clientX: x, clientY: y } = event);
  };
  const up = () => {
    this.paper.classList.remove("dragged");
    window.removeEventListener("pointermove", move);
    window.removeEventListener("pointerup", up);
  };
  window.addEventListener("pointermove", move);
  window.addEventListener("pointerup", up);
};

Page.prototype.searchKey = function searchKey(event) {
  if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
  else if (event.key === "Escape") {
    event.target.value = "";
    this.search("");
    (this.drawing.groups.get(this.selected) ?? this.drawing.groups.get(0)).focus({ preventScroll: true });
  } else return;
  event.preventDefault();
  event.stopPropagation();
};

Page.prototype.key = function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
  const keys = {
    "/": () => document.getElementById("query").focus(),
    "+": () => this.zoomBy(1.25),
    "-": () => this.zoomBy(0.8),
    0: () => this.fit(),
    1: () => this.openLevel("module"),
    2: () => this.openLevel("block"),
    3: () => this.openLevel("layer"),
  };
  const inDrawing = (event.target === document.body || event.target.closest?.(".box")) && {
    ArrowDown: () => this.walk(1),
    ArrowUp: () => this.walk(-1),
    ArrowRight: () => this.enter(),
    ArrowLeft: () => this.leave(),
    Enter: () => this.toggle(this.selected ?? 0),
    " ": () => this.toggle(this.selected ?? 0),
  };
  const act = keys[event.key] ?? (inDrawing && inDrawing[event.key]);
  if (!act) return;
  event.preventDefault();
  act();
};

// The next or previous box that is seen, in forward order.
Page.prototype.walk = function walk(by) {
  const seen = [...this.drawing.groups.keys()].sort((a, b) => a - b);
  const at = seen.indexOf(this.selected ?? 0);
  this.goTo(seen[Math.min(seen.length - 1, Math.max(0, at + by))]);
};

Page.prototype.enter = function enter() {
  const id = this.selected ?? 0;
  if (!this.model.isBlock(id)) return;
  if (this.isOpen(id)) this.walk(1);
  else this.toggle(id);
};

Page.prototype.leave = function leave() {
  const id = this.selected ?? 0;
  if (id && this.isOpen(id)) this.toggle(id);
  else if (this.model.parent[id] >= 0) this.goTo(this.model.parent[id]);
};

const KEYS = [
  ["Click, Enter", "open or close a block"], ["↓ ↑", "walk in forward order"], ["→ ←", "go in, go out"],
  ["/", "find a layer"], ["1 2 3", "modules, blocks, layers"], ["+ − 0", "larger, smaller, fit"], ["Ctrl + wheel", "zoom"],
];

class Panel {
  constructor(page) {
    this.page = page;
    this.place = document.getElementById("panel");
  }

  make(name, text, ...inside) {
    const made = document.createElement(name);
    if (text !== null) made.textContent = text;
    made.append(...inside);
    return made;
  }

  list(pairs) {
    return this.make("dl", null, ...pairs.flatMap(([term, what]) => [this.make("dt", term), what instanceof Node ? what : this.make("dd", what)]));
  }

  show(id) {
    this.place.replaceChildren(...(id === null ? this.help() : this.about(id)));
  }

  help() {
    const keys = KEYS.map(([key, what]) => [key, this.make("dd", what)]);
    const list = this.list(keys);
    list.querySelectorAll("dt").forEach((term) => term.replaceChildren(this.make("kbd", term.textContent)));
    return [this.make("p", "One box for each layer, in forward order from top to bottom. Click a box to see what is known of it."), list];
  }

  about(id) {
    const { model } = this.page;
    const facts = [];
    const add = (term, what) => what && facts.push([term, what]);
    add("kind", model.kind[id]);
    add("operation", model.op[id]);
    add("output", model.shape[id]);
    if (model.start[id] < model.stop[id]) {
      add("parameters", model.parameters[id].toLocaleString("en"));
      add("FLOPs", model.flops[id].toLocaleString("en"));
    }
    if (model.isBlock(id)) add("layers", String(model.layers[id]));
    for (const [term, what] of model.facts[id] ?? []) add(term, what);
    const stages = model.stagesOf(id).map(({ stage }) => this.stage(stage));
    if (stages.length) facts.push(["stage", this.make("dd", null, ...stages)]);
    const title = model.site[id] || model.name[id];
    const fold = model.isBlock(id) && id ? [this.button(this.page.isOpen(id) ? "Close" : "Open", () => this.page.toggle(id))] : [];
    return [this.make("h2", title), ...fold, this.list(facts), ...this.others(id)];
  }

  stage(stage) {
    const made = this.make("div", this.page.model.stages[stage].name);
    made.className = "stage";
    made.style.setProperty("--hue", this.page.model.stages[stage].hue);
    return made;
  }

  button(text, act) {
    const made = this.make("button", text);
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  }

  // What a box reads and who reads it: the layers at the other ends of its edges.
  others(id) {
    const { edges, site, kind, shape } = this.page.model;
    const name = (other) => [site[other], kind[other], shape[other]].filter(Boolean).join(" · ");
    const inside = (box) => this.page.model.isInside(box, id);
    const reads = new Set(edges.filter(([from, to]) => inside(to) && !inside(from)).map(([from]) => from));
    const readers = new Set(edges.filter(([from, to]) => inside(from) && !inside(to)).map(([, to]) => to));
    return [["Reads", reads], ["Read by", readers]].flatMap(([title, ids]) => {
      if (!ids.size) return [];
      const items = [...ids].sort((a, b) => a - b).map((other) => this.make("li", null, this.button(name(other), () => this.page.goTo(other))));
      return [this.make("h3", `${title} (${ids.size})`), this.make("ul", null, ...items)];
    });
  }}

new Page(new Model(JSON.parse(document.getElementById("data").textContent)));
