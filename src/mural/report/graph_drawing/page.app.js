// The page: what is open, selected and searched for, and how keys, clicks and the wheel change it.

class Model {
  constructor(data) {
    Object.assign(this, data.boxes, data);
    this.children = this.rows.map((rows) => rows.flat());
    this.row = [];
    for (const rows of this.rows) rows.forEach((boxes, at) => boxes.forEach((id) => (this.row[id] = at)));
    // Values that leave a box take turns in running down its right and its left side, the same in all boxes they pass.
    const leaving = Object.values(data.nets).flatMap((nets) => nets.filter(([, , , leaves]) => leaves).map(([origin]) => origin));
    this.side = new Map([...new Set(leaving)].sort((a, b) => a - b).map((origin, i) => [origin, i % 2 ? -1 : 1]));
    this.words = this.name.map((_, id) => comparable(`${this.site[id]} ${this.name[id]} ${this.kind[id]} ${this.op[id]} ${this.shape[id]}`));
  }

  isBlock(id) {
    return this.children[id].length > 0;
  }

  around(id) {
    const line = [];
    for (let at = this.parent[id]; at >= 0; at = this.parent[at]) line.unshift(at);
    return line;
  }

  isInside(id, block) {
    let at = id;
    while (at > block) at = this.parent[at];
    return at === block;
  }

  // The stages that a box lies in, with how many of its calls are in each.
  stagesOf(id) {
    const [low, high] = [this.start[id], this.stop[id]];
    return this.stages
      .map(({ start, stop }, stage) => ({ stage, calls: Math.min(stop, high) - Math.max(start, low) }))
      .filter(({ calls }) => calls > 0);
  }

  // Whether an edge leads to a box that has no part in the stage of its origin.
  crosses(origin, target) {
    if (this.start[origin] === this.stop[origin] || this.start[target] === this.stop[target]) return false;
    const [home] = this.stagesOf(origin);
    return home !== undefined && !this.stagesOf(target).some(({ stage }) => stage === home.stage);
  }

  spoken(id) {
    const stages = this.stagesOf(id).map(({ stage }) => this.stages[stage].name).join(", ");
    const refused = this.refused[id] ? "without a rule" : "";
    return [this.site[id] || this.name[id], this.kind[id], this.shape[id], stages, refused].filter(Boolean).join(", ");
  }
}

// Names and shapes as they are compared: (1, 64, 56, 56), 1×64×56×56 and 1x64x56x56 are the same.
function comparable(text) {
  return text.toLowerCase().replaceAll("×", "x").replace(/[()[\]]/g, "").replace(/(\d)\s*,\s*(?=\d)/g, "$1x");
}

class Page {
  constructor(model) {
    this.model = model;
    this.opened = new Set(model.opened);
    Object.assign(this, { selected: null, matches: new Set(), found: [], at: -1, stage: null, zoom: 1 });
    this.isOpen = (id) => this.opened.has(id);
    this.paper = document.getElementById("paper");
    this.layout = new Layout(model, this.isOpen);
    this.drawing = new Drawing(document.getElementById("drawing"), model, this.layout, this);
    this.panel = new Panel(this);
    this.listen();
    this.legend();
    document.getElementById("title").append(model.title, Page.summary(model.summary));
    this.drawing.render();
    this.fit();
    this.panel.show(null);
  }

  // What the model adds up to; what a plan refuses has the colour that it has in the drawing.
  static summary(text) {
    const small = document.createElement("small");
    text.split(" · ").forEach((part, place) => {
      const words = document.createElement(part.endsWith("without a rule") ? "em" : "span");
      words.textContent = part;
      small.append(place ? " · " : "", words);
    });
    return small;
  }

  // Draw again after boxes were opened or closed; the box in question stays where it is on the screen.
  redraw(anchor) {
    const before = this.topLeft(anchor);
    this.drawing.render();
    this.resize();
    const after = this.topLeft(anchor);
    if (before && after) this.paper.scrollBy(after.x - before.x, after.y - before.y);
    if (anchor) this.reveal(anchor);
  }

  // Scroll sideways as little as brings a box into view, or its left edge if it is wider than the paper.
  reveal(id) {
    const box = this.topLeft(id);
    const paper = this.paper.getBoundingClientRect();
    const over = Math.max(0, box.right + SPACE.pad - paper.right);
    this.paper.scrollBy(Math.min(box.left - SPACE.pad - paper.left, over), 0);
  }

  topLeft(id) {
    const group = this.drawing.groups.get(id);
    return group?.querySelector("rect.body").getBoundingClientRect();
  }

  resize() {
    const { width, height } = this.drawing.size;
    this.drawing.svg.setAttribute("width", width * this.zoom);
    this.drawing.svg.setAttribute("height", height * this.zoom);
  }

  fit() {
    const { width, height } = this.drawing.size;
    const whole = Math.min(this.paper.clientWidth / width, this.paper.clientHeight / height);
    this.zoom = Math.min(1.25, Math.max(0.9, whole));
    this.resize();
    this.center(this.drawing.groups.has(this.selected) && this.selected ? this.selected : this.model.children[0][0]);
  }

  zoomBy(factor, x = this.paper.clientWidth / 2, y = this.paper.clientHeight / 2) {
    const zoom = Math.min(4, Math.max(0.03, this.zoom * factor));
    const left = (this.paper.scrollLeft + x) * (zoom / this.zoom) - x;
    const top = (this.paper.scrollTop + y) * (zoom / this.zoom) - y;
    this.zoom = zoom;
    this.resize();
    this.paper.scrollTo(left, top);
  }

  setOpen(ids, anchor) {
    for (const [id, open] of ids) {
      if (open) this.opened.add(id);
      else this.opened.delete(id);
      this.layout.forget(id);
    }
    this.redraw(anchor);
  }

  // Open or close a box that has something inside; the whole model stays open.
  toggle(id) {
    if (id && this.model.isBlock(id)) this.setOpen([[id, !this.isOpen(id)]], id);
    this.select(id);
  }

  openLevel(level) {
    const levels = ["module", "block", "layer"];
    const wanted = levels.slice(0, levels.indexOf(level) + 1);
    const blocks = this.model.name.map((_, id) => id).filter((id) => this.model.isBlock(id));
    this.setOpen(blocks.map((id) => [id, wanted.includes(this.model.level[id])]), 0);
    this.fit();
  }

  select(id, focus = true) {
    this.selected = id;
    this.drawing.mark();
    this.panel.show(id);
    if (focus) this.drawing.groups.get(id)?.focus({ preventScroll: true });
  }

  // Open what is around a box, select it and bring it to the middle of the paper.
  goTo(id, focus = true) {
    const closed = this.model.around(id).filter((block) => !this.isOpen(block));
    if (closed.length) this.setOpen(closed.map((block) => [block, true]), 0);
    this.select(id, focus);
    this.center(id);
  }

  center(id) {
    const box = this.topLeft(id);
    if (!box) return;
    const paper = this.paper.getBoundingClientRect();
    const tall = Math.min(box.height, paper.height);
    this.paper.scrollBy(box.x + box.width / 2 - paper.x - paper.width / 2, box.y + tall / 2 - paper.y - paper.height / 2);
  }

  search(query) {
    const words = comparable(query).split(/\s+/).filter(Boolean);
    const fits = (id) => words.every((word) => this.model.words[id].includes(word));
    const hits = words.length ? this.model.name.map((_, id) => id).filter((id) => id && fits(id)) : [];
    // A block's name is part of the names of its layers: it is found as one, unless only it was meant.
    const layers = hits.filter((id) => !this.model.isBlock(id));
    const own = hits.filter((id) => this.model.isBlock(id) && words.some((word) => comparable(`${this.model.name[id]} ${this.model.kind[id]}`).includes(word)));
    this.found = [...own, ...layers].sort((a, b) => a - b);
    this.matches = new Set(this.found);
    this.at = -1;
    if (this.found.length) this.step(1);
    else this.drawing.mark();
    this.tell(words.length);
  }

  step(by) {
    if (!this.found.length) return;
    this.at = (this.at + by + this.found.length) % this.found.length;
    this.goTo(this.found[this.at], false);
    this.tell(true);
  }

  tell(asked) {
    const text = this.found.length ? `${this.at + 1} of ${this.found.length}` : "nothing found";
    document.getElementById("count").textContent = text;
    document.getElementById("search").classList.toggle("asked", Boolean(asked));
  }

  matchesInside() {
    const counts = new Map();
    for (const id of this.matches) for (const block of this.model.around(id)) counts.set(block, (counts.get(block) ?? 0) + 1);
    return counts;
  }

  legend() {
    const legend = document.getElementById("legend");
    legend.hidden = !this.model.stages.length;
    this.model.stages.forEach(({ name, hue, summary }, stage) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "stage";
      button.style.setProperty("--hue", hue);
      button.setAttribute("aria-pressed", "false");
      button.textContent = `${name}: ${summary}`;
      button.addEventListener("click", () => this.chooseStage(this.stage === stage ? null : stage));
      legend.append(button);
    });
  }

  chooseStage(stage) {
    this.stage = stage;
    document.querySelectorAll("#legend button").forEach((button, i) => button.setAttribute("aria-pressed", i === stage));
    this.drawing.mark();
  }
}
