// Inside: where the children of an open box stand, and where the edges between them run. They stand in rows, forward
// order from top to bottom. An edge that crosses the box's border passes through a port there.
//
//     ┌─ block ──○──────┐    ○ port: a value enters
//     │  ┌───────┴──╮   │
//     │  │ layer │  │   │    │ corridor: the nearest x at which no box of the rows between is in the way
//     │  └───┬───┘  │   │
//     │  ┌───┴──────┴┐  │
//     │  │ layer     │  │
//     └──┴─────○─────┴──┘    ○ port: a value leaves

// The children of one open box, their rows, and the nets between them: a net is one value with all its readers here.
class Inside {
  constructor(layout, id) {
    const { model } = layout;
    this.children = model.children[id];
    this.sizes = new Map(this.children.map((child) => [child, layout.of(child)]));
    this.rows = model.rows[id];
    this.row = (child) => model.row[child];
    this.nets = (model.nets[id] ?? []).map(([origin, source, targets, leaves]) => {
      const from = source < 0 ? -1 : this.row(source);
      const last = leaves ? this.rows.length : Math.max(...targets.map(this.row));
      return { origin, source, targets, leaves, from, last, lane: null, ends: new Map() };
    });
    this.center = new Map();
    this.side = model.side;
  }

  width(child) {
    return this.sizes.get(child).width;
  }

  // Where a net leaves or enters a child, from the child's center: at its port if it is open.
  shift(child, origin, side) {
    const port = this.sizes.get(child)[side].get(origin);
    return port === undefined ? 0 : port - this.width(child) / 2;
  }

  placeAcross() {
    for (const row of this.rows) {
      const middle = row.map(() => 0);
      spread(row.map((c) => this.width(c)), middle, row.map(() => 1), SPACE.beside).forEach((x, i) => this.center.set(row[i], x));
    }
    const links = new Map(this.children.map((child) => [child, []]));
    for (const net of this.nets.filter((net) => net.source >= 0)) {
      for (const target of net.targets) {
        const shift = this.shift(net.source, net.origin, "outs") - this.shift(target, net.origin, "ins");
        const weight = 1 / (this.row(target) - net.from) ** 2;
        links.get(target).push({ to: net.source, shift, weight, up: true });
        links.get(net.source).push({ to: target, shift: -shift, weight, up: false });
      }
    }
    const sweeps = this.children.length > this.rows.length ? 12 : 4;
    for (let sweep = 0; sweep < sweeps; sweep += 1) {
      const rows = sweep % 2 ? [...this.rows].reverse() : this.rows;
      for (const row of rows) this.settle(row, links, sweep < sweeps - 4 ? sweep % 2 === 0 : null);
    }
  }

  settle(row, links, up) {
    const wished = row.map((child) => {
      const seen = links.get(child).filter((link) => up === null || link.up === up);
      // Wide boxes are drawn to the middle as well: else those with ports far aside would stand like stairs.
      const middle = this.width(child) > SPACE.wide ? 0.6 : 0;
      const total = middle + seen.reduce((sum, link) => sum + link.weight, 0);
      if (!total) return { x: this.center.get(child), weight: 0.1 };
      return { x: seen.reduce((sum, l) => sum + l.weight * (this.center.get(l.to) + l.shift), 0) / total, weight: total };
    });
    const places = spread(row.map((c) => this.width(c)), wished.map((w) => w.x), wished.map((w) => w.weight), SPACE.beside);
    places.forEach((x, i) => this.center.set(row[i], x));
  }

  // An edge over several rows runs down a corridor; short ones choose first.
  findCorridors() {
    const lanes = this.rows.map(() => []);
    const long = this.nets.filter((net) => net.last > net.from + 1);
    for (const net of long.sort((a, b) => a.last - a.from - (b.last - b.from) || a.origin - b.origin)) {
      const far = net.targets.filter((target) => this.row(target) > net.from + 1);
      const ends = far.map((target) => this.center.get(target) + this.shift(target, net.origin, "ins"));
      if (net.source >= 0) ends.push(this.center.get(net.source) + this.shift(net.source, net.origin, "outs"));
      const taken = [];
      for (let row = net.from + 1; row < net.last; row += 1) {
        for (const child of this.rows[row]) {
          const half = this.width(child) / 2 + SPACE.lane;
          taken.push([this.center.get(child) - half, this.center.get(child) + half]);
        }
        for (const lane of lanes[row]) taken.push([lane - SPACE.lane, lane + SPACE.lane]);
      }
      const wished = ends.reduce((a, b) => a + b, 0) / Math.max(1, ends.length);
      const wrong = (x) => Math.sign(x - wished) === -this.side.get(net.origin);
      const cost = (x) => Math.abs(x - wished) + SPACE.crossing * (this.crossings(net, x < wished, wished, long) + wrong(x));
      net.lane = nearestFree(taken, wished).reduce((a, b) => (cost(b) <= cost(a) ? b : a));
      for (let row = net.from + 1; row < net.last; row += 1) lanes[row].push(net.lane);
    }
  }

  // How many edges on the same side begin in the gap where this one ends, or end where it begins.
  crossings(net, left, wished, long) {
    const meets = (other) => other.last === net.from + 1 || other.from + 1 === net.last;
    return long.filter((other) => other.lane !== null && other.lane < wished === left && meets(other)).length;
  }

  placePorts() {
    const ends = (child, side) => this.nets.filter((net) => (side === "outs" ? net.source === child : net.targets.includes(child)));
    for (const child of this.children) {
      for (const side of ["ins", "outs"]) {
        const nets = ends(child, side).map((net) => ({ net, aim: this.aim(net, child, side) })).sort((a, b) => a.aim - b.aim);
        const step = Math.min(SPACE.port, (this.width(child) - 4 * SPACE.round) / Math.max(1, nets.length - 1));
        nets.forEach(({ net }, i) => {
          const open = this.sizes.get(child)[side].has(net.origin);
          const shift = open ? this.shift(child, net.origin, side) : (i - (nets.length - 1) / 2) * step;
          net.ends.set(side === "outs" ? "source" : child, this.center.get(child) + shift);
        });
      }
    }
    for (const side of ["ins", "outs"]) {
      const nets = this.nets.filter((net) => (side === "ins" ? net.source < 0 : net.leaves));
      const aims = nets.map((net) => ({ net, aim: side === "ins" ? this.entry(net) : this.exit(net) })).sort((a, b) => a.aim - b.aim);
      const places = spread(aims.map(() => 0), aims.map((a) => a.aim), aims.map(() => 1), SPACE.port);
      aims.forEach(({ net }, i) => net.ends.set(side === "ins" ? "source" : "port", places[i]));
    }
  }

  // Where the other end of a net is, seen from a child.
  aim(net, child, side) {
    if (side === "ins") {
      const near = this.row(child) === net.from + 1;
      if (!near) return net.lane;
      return net.source < 0 ? (net.lane ?? this.center.get(child)) : this.center.get(net.source) + this.shift(net.source, net.origin, "outs");
    }
    if (net.lane !== null) return net.lane;
    const near = net.targets.map((target) => this.center.get(target));
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : this.center.get(child);
  }

  entry(net) {
    const near = net.targets.filter((target) => this.row(target) === 0).map((target) => net.ends.get(target));
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : net.lane;
  }

  exit(net) {
    return net.lane ?? net.ends.get("source");
  }

  // The y of each row; where edges go far to the side, more room is left above it.
  placeDown() {
    const far = Array(this.rows.length + 1).fill(0);
    for (const net of this.nets) {
      const start = net.ends.get("source");
      if (net.lane !== null) far[net.from + 1] = Math.max(far[net.from + 1], Math.abs(net.lane - start));
      for (const target of net.targets) {
        const near = this.row(target) === net.from + 1;
        far[this.row(target)] = Math.max(far[this.row(target)], Math.abs((near ? start : net.lane) - net.ends.get(target)));
      }
    }
    const gap = far.map((x) => Math.min(SPACE.tallest, SPACE.between + SPACE.steep * x));
    this.top = [];
    this.heights = this.rows.map((row) => Math.max(...row.map((child) => this.sizes.get(child).height)));
    let y = SPACE.head + (this.nets.some((net) => net.source < 0) ? gap[0] : 0);
    this.rows.forEach((_, i) => {
      if (i) y += gap[i];
      this.top.push(y);
      y += this.heights[i];
    });
    this.bottom = y + (this.nets.some((net) => net.leaves) ? gap[this.rows.length] : SPACE.pad);
  }

  result(least) {
    const xs = this.children.flatMap((c) => [this.center.get(c) - this.width(c) / 2, this.center.get(c) + this.width(c) / 2]);
    for (const net of this.nets) xs.push(...net.ends.values(), ...(net.lane === null ? [] : [net.lane]));
    const low = Math.min(...xs) - SPACE.pad;
    const spare = Math.max(0, least - (Math.max(...xs) + SPACE.pad - low));
    this.left = low - spare / 2;
    const width = Math.max(...xs) + SPACE.pad + spare / 2 - this.left;
    const at = new Map();
    for (const child of this.children) {
      const { width: w, height } = this.sizes.get(child);
      const row = this.row(child);
      at.set(child, { x: this.center.get(child) - w / 2 - this.left, y: this.top[row] + (this.heights[row] - height) / 2 });
    }
    const title = this.titlePlace(least - 2 * SPACE.pad);
    const port = (side, key) => new Map(this.nets.filter(side).map((net) => [net.origin, net.ends.get(key) - this.left]));
    const nets = this.nets.map((net) => ({ ...net, paths: this.paths(net, at) }));
    return { width: Math.max(width, title + least - SPACE.pad), height: this.bottom, title, at, nets, ins: port((n) => n.source < 0, "source"), outs: port((n) => n.leaves, "port") };
  }

  // The first x at which a title of this width is not crossed by an edge that enters through the border above it.
  titlePlace(width) {
    const ports = this.nets.filter((net) => net.source < 0).map((net) => net.ends.get("source") - this.left);
    let x = SPACE.title;
    for (const port of ports.sort((a, b) => a - b)) {
      if (port > x + width + SPACE.lane) break;
      x = Math.max(x, port + SPACE.lane);
    }
    return x;
  }

  // The strokes of a net: its stem down to the last row but one, and a branch to each reader.
  paths(net, at) {
    const x = (place) => place - this.left;
    const start = x(net.ends.get("source"));
    const begin = net.source < 0 ? 0 : at.get(net.source).y + this.sizes.get(net.source).height;
    const floor = (row) => (row < 0 ? SPACE.head : this.top[row] + this.heights[row]);
    const down = (row) => `M${start} ${begin}V${floor(row)}`;
    const bend = (fromX, fromY, toX, toY) => {
      const middle = (fromY + toY) / 2;
      return Math.abs(fromX - toX) < 0.5 ? `V${toY}` : `C${fromX} ${middle + 8} ${toX} ${middle - 8} ${toX} ${toY}`;
    };
    const made = [];
    if (net.lane !== null) {
      const lane = x(net.lane);
      made.push({ d: `${down(net.from)}${bend(start, floor(net.from), lane, this.top[net.from + 1])}V${floor(net.last - 1)}`, stem: true });
    }
    const branch = (row, toX, toY, ceiling) => {
      const near = row === net.from + 1;
      const from = near ? start : x(net.lane);
      const lead = near ? down(net.from) : `M${from} ${floor(row - 1)}`;
      return `${lead}${bend(from, floor(row - 1), toX, ceiling)}V${toY}`;
    };
    for (const target of net.targets) {
      const row = this.row(target);
      const end = x(net.ends.get(target));
      made.push({ d: branch(row, end, at.get(target).y, this.top[row] - SPACE.arrow), to: target, far: row > net.from + 1 });
    }
    if (net.leaves) made.push({ d: branch(this.rows.length, x(net.ends.get("port")), this.bottom, this.bottom) });
    return made;
  }
}
