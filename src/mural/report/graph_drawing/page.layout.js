// Layout: how large boxes are. Each box is laid out by itself, and again only when something inside it changes.

const SPACE = { beside: 20, between: 24, steep: 0.07, tallest: 64, pad: 16, title: 12, head: 30, lane: 9, port: 11, round: 6, crossing: 40, arrow: 9, wide: 340 };
const LINE = { height: 46, pad: 12, least: 96, most: 300 };

const pen = document.createElement("canvas").getContext("2d");
function widthOf(text, font) {
  pen.font = font;
  return pen.measureText(text).width;
}

function fonts() {
  const family = getComputedStyle(document.body).fontFamily;
  return { name: `600 13px ${family}`, kind: `13px ${family}`, shape: `12px ${family}` };
}

// The text in no more than this width; what is left out is its middle.
function fitted(text, font, most) {
  if (widthOf(text, font) <= most) return text;
  let keep = text.length - 1;
  const short = () => text.slice(0, Math.ceil(keep / 2)) + "…" + text.slice(text.length - Math.floor(keep / 2));
  while (keep > 2 && widthOf(short(), font) > most) keep -= 1;
  return short();
}

// The places nearest to the wished ones, in this order and without overlap: least squares, by pooling neighbours.
function spread(widths, wished, weights, gap) {
  const offsets = [];
  const pools = [];
  let offset = 0;
  widths.forEach((width, i) => {
    if (i) offset += (widths[i - 1] + width) / 2 + gap;
    offsets.push(offset);
    let pool = { weight: weights[i], mean: wished[i] - offset, count: 1 };
    while (pools.length && pools[pools.length - 1].mean > pool.mean) {
      const left = pools.pop();
      const weight = left.weight + pool.weight;
      pool = { weight, mean: (left.mean * left.weight + pool.mean * pool.weight) / weight, count: left.count + pool.count };
    }
    pools.push(pool);
  });
  return pools.flatMap((pool) => Array(pool.count).fill(pool.mean)).map((mean, i) => mean + offsets[i]);
}

// The free places nearest to the wished x, given the intervals that are taken: one, or one to each side.
function nearestFree(taken, wished) {
  taken.sort((a, b) => a[0] - b[0]);
  const merged = [];
  for (const [low, high] of taken) {
    const last = merged[merged.length - 1];
    if (last && low <= last[1]) last[1] = Math.max(last[1], high);
    else merged.push([low, high]);
  }
  const inside = merged.find(([low, high]) => low < wished && wished < high);
  return inside ?? [wished];
}

class Layout {
  constructor(model, isOpen) {
    this.model = model;
    this.isOpen = isOpen;
    this.kept = new Map();
    this.labels = new Map();
    this.fonts = fonts();
  }

  // Forget the boxes around one whose inside has changed.
  forget(id) {
    for (let at = id; at >= 0; at = this.model.parent[at]) this.kept.delete(at);
  }

  of(id) {
    if (!this.kept.has(id)) this.kept.set(id, this.isOpen(id) ? this.around(id) : this.closed(id));
    return this.kept.get(id);
  }

  label(id) {
    if (!this.labels.has(id)) {
      const { name, kind, shape, layers } = this.model;
      const most = LINE.most - 2 * LINE.pad;
      const fold = this.model.children[id].length ? "▸ " : "";
      const shownName = fitted(name[id], this.fonts.name, most - widthOf(fold, this.fonts.kind));
      const start = widthOf(fold, this.fonts.kind) + widthOf(shownName, this.fonts.name);
      const rest = most - start;
      const shownKind = kind[id] && rest > 50 ? fitted(" " + kind[id], this.fonts.kind, rest) : "";
      const below = layers[id] > 1 ? `${shape[id]} · ${layers[id]} layers` : shape[id];
      const shownShape = fitted(below, this.fonts.shape, most);
      const width = Math.max(start + widthOf(shownKind, this.fonts.kind), widthOf(shownShape, this.fonts.shape));
      this.labels.set(id, { name: shownName, kind: shownKind, below: shownShape, start, width: width + 2 * LINE.pad });
    }
    return this.labels.get(id);
  }

  closed(id) {
    return { width: Math.max(LINE.least, this.label(id).width + 4), height: LINE.height, ins: new Map(), outs: new Map() };
  }

  around(id) {
    const inside = new Inside(this, id);
    inside.placeAcross();
    inside.findCorridors();
    inside.placePorts();
    inside.placeDown();
    return inside.result(this.label(id).start + widthOf(this.label(id).kind, this.fonts.kind) + 2 * SPACE.pad);
  }
}
