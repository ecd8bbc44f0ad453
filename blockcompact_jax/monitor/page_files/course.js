"use strict";
// Views of one run's course: residency over time, acceptance by round, the log of decisions.
const makeCourseViews = ({ h, s, show, empty, makeTable }) => {
  const KINDS = { kept: "resident before and now", fresh: "new: uploaded, or from the tail",
    dropped: "dropped by this selection", tail: "always-resident tail", absent: "not resident" };
  const sum = (numbers) => numbers.reduce((left, right) => left + right, 0);
  const count = (number) => number.toLocaleString("en");

  function bitsOf(text, length) {
    const bytes = atob(text);
    return Array.from({ length }, (_, block) => (bytes.charCodeAt(block >> 3) >> (block & 7)) & 1);
  }

  // Kind of each block of a row, up to the end of the sequence as it was then.
  function kindsOf(selection, before, row, blockTokens) {
    const candidates = selection.num_candidate_blocks;
    const now = bitsOf(selection.resident[row], candidates);
    const was = before ? bitsOf(before.resident[row], before.num_candidate_blocks) : [];
    const kinds = now.map((bit, block) =>
      (bit ? (was[block] ? "kept" : "fresh") : was[block] ? "dropped" : "absent"));
    const all = Math.ceil(selection.num_tokens / blockTokens);
    return kinds.concat(new Array(Math.max(all - candidates, 0)).fill("tail"));
  }

  // One path a kind, of a rectangle for each run of equal neighbours.
  function pathsOf(grid) {
    const paths = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, []]));
    grid.forEach((kinds, row) => {
      for (let first = 0, end = 0; first < kinds.length; first = end) {
        while (end < kinds.length && kinds[end] === kinds[first]) end += 1;
        paths[kinds[first]].push(`M${first} ${row + 0.06}h${end - first}v.88h${first - end}z`);
      }
    });
    return Object.entries(paths).map(([kind, parts]) => s("path", { class: kind, d: parts.join("") }));
  }

  function residencyMap(course) {
    const { selections, layers, block_tokens: blockTokens } = course;
    if (!selections.length || !layers.length) return empty("No selection was recorded.");
    const width = Math.max(...selections.map((each) => Math.ceil(each.num_tokens / blockTokens)), 1);
    let grid = [];
    const svg = s("svg", { class: "map", viewBox: `0 0 ${width} ${layers.length}`, role: "img",
      preserveAspectRatio: "none", "aria-label": "Resident blocks by layer",
      style: `height: ${Math.max(layers.length * 11, 44)}px; min-width: ${Math.min(width * 2, 6000)}px`,
      onpointermove: tell, onpointerdown: tell });
    const facts = h("p", { class: "facts" });
    const place = h("output", { class: "dim" }, "Point at a block.");
    const slider = h("input", { type: "range", min: 0, max: selections.length - 1, value: 0, step: 1,
      "aria-label": "Selection", oninput: draw });
    const step = (by, text, name) => h("button", { type: "button", "aria-label": name,
      onclick: () => { slider.value = Number(slider.value) + by; draw(); } }, text);
    const table = h("div", {});
    const counts = h("details", { ontoggle: drawCounts }, h("summary", { class: "plain" }, "Counts by layer"), table);

    function draw() {
      const number = Number(slider.value);
      const selection = selections[number];
      grid = layers.map((_, row) => kindsOf(selection, selections[number - 1], row, blockTokens));
      svg.replaceChildren(...pathsOf(grid));
      const text = `Selection ${selection.number + 1} of ${course.num_selections}, `
        + `${selection.after_round ? `after round ${selection.after_round}` : "after the prefill"}: `
        + `${count(selection.num_tokens)} tokens, ${count(selection.num_candidate_blocks)} candidate blocks; `
        + `in all layers ${count(sum(selection.num_uploaded))} blocks uploaded, `
        + `${count(sum(selection.num_kept))} kept, ${count(sum(selection.num_dropped))} dropped, `
        + `${count(selection.metrics.physical_blocks_released)} physical blocks released.`;
      facts.textContent = text;
      slider.setAttribute("aria-valuetext", text);
      drawCounts();
    }
    function drawCounts() {
      if (!counts.open) return;
      const selection = selections[Number(slider.value)];
      const rows = layers.map((layer, row) => [layer,
        grid[row].filter((kind) => kind === "kept" || kind === "fresh").length,
        selection.num_uploaded[row], selection.num_kept[row], selection.num_dropped[row]]);
      const columns = ["layer", "resident", "uploaded", "kept", "dropped"];
      table.replaceChildren(makeTable({ columns, rows, shown: columns, name: "layers" }));
    }
    function tell(event) {
      const box = svg.getBoundingClientRect();
      const block = Math.floor(((event.clientX - box.left) / box.width) * width);
      const row = Math.floor(((event.clientY - box.top) / box.height) * layers.length);
      const kind = grid[row] && grid[row][block];
      place.textContent = kind ? `Layer ${layers[row]}, block ${block}, tokens ${block * blockTokens} to `
        + `${(block + 1) * blockTokens - 1}: ${KINDS[kind]}` : "Point at a block.";
    }

    draw();
    const thinned = course.selection_stride > 1
      ? empty(`Every ${course.selection_stride}th selection was recorded; changes are against the one recorded before.`) : null;
    return h("figure", { class: "wide residency" }, h("figcaption", {}, h("b", {}, "residency: layers × blocks over time")),
      h("div", { class: "bar" }, step(-1, "‹", "Earlier selection"), slider, step(1, "›", "Later selection")),
      facts, thinned,
      h("div", { class: "ends" }, h("span", {}, `layer ${layers[0]}, block 0`), h("span", {}, `block ${width - 1}`)),
      h("div", { class: "scroll" }, svg),
      h("div", { class: "ends" }, h("span", {}, `layer ${layers[layers.length - 1]}`)),
      h("div", { class: "legend" }, Object.entries(KINDS).map(([kind, text]) =>
        h("span", {}, h("i", { class: kind }), text))), place, counts);
  }

  function acceptanceChart(course) {
    const caption = h("figcaption", {}, h("b", {}, "acceptance over rounds"));
    const { columns, rows } = course.rounds;
    const at = (row, name) => row[columns.indexOf(name)];
    const drafted = rows.filter((row) => at(row, "num_drafted") > 0);
    if (!drafted.length) return h("figure", {}, caption, empty("No round was recorded."));
    const [wide, high, left, bottom] = [440, 200, 44, 34];
    const last = rows.length;
    const px = (round) => left + ((round - 0.5) / last) * (wide - left - 8);
    const py = (share) => high - bottom - share * (high - bottom - 12);
    const axes = [0, 0.25, 0.5, 0.75, 1].flatMap((share) => [
      s("line", { class: "axis", x1: left, x2: wide - 8, y1: py(share), y2: py(share) }),
      s("text", { x: left - 5, y: py(share) + 4, "text-anchor": "end" }, `${100 * share} %`)]);
    const anew = rows.filter((row) => at(row, "action") === "select anew").map((row) => at(row, "round"));
    const marks = anew.map((round) => s("line", { class: "anew", x1: px(round + 0.5), x2: px(round + 0.5),
      y1: py(1), y2: py(0) }));
    const dots = drafted.map((row) => s("circle", { cx: px(at(row, "round")), r: 3,
      cy: py(at(row, "num_accepted") / at(row, "num_drafted")) }, s("title", {},
      `Round ${at(row, "round")}: ${at(row, "num_accepted")} of ${at(row, "num_drafted")} accepted, `
        + `${at(row, "num_gained")} tokens gained, ${show(at(row, "round_us"))} µs`)));
    const ends = [0, ...anew, last];
    const means = ends.slice(1).map((end, number) => {
      const cycle = drafted.filter((row) => at(row, "round") > ends[number] && at(row, "round") <= end);
      if (!cycle.length) return null;
      const y = py(sum(cycle.map((row) => at(row, "num_accepted"))) / sum(cycle.map((row) => at(row, "num_drafted"))));
      return s("line", { class: "mean", x1: px(ends[number] + 0.5), x2: px(end + 0.5), y1: y, y2: y });
    });
    return h("figure", { class: "acceptance" }, caption,
      h("div", { class: "dim" }, "dots are rounds, lines the mean of a cycle; blocks are selected anew at the dashes"),
      s("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "Acceptance over rounds" },
        axes, marks, means, dots,
        s("text", { x: left, y: high - bottom + 16 }, "1"),
        s("text", { x: wide - 8, y: high - bottom + 16, "text-anchor": "end" }, `round ${last}`)));
  }

  // What a selection kept and brought, in all layers together.
  function selectionChart(course) {
    const caption = h("figcaption", {}, h("b", {}, "blocks by selection"));
    if (!course.selections.length) return h("figure", {}, caption, empty("No selection was recorded."));
    const bars = course.selections.map((each) =>
      ({ kept: sum(each.num_kept), fresh: sum(each.num_uploaded), dropped: sum(each.num_dropped), number: each.number + 1 }));
    const [wide, high, left, bottom] = [440, 200, 52, 34];
    const top = Math.max(...bars.map((each) => each.kept + each.fresh), 1);
    const low = Math.max(...bars.map((each) => each.dropped), 0);
    const py = (blocks) => 12 + ((top - blocks) / (top + low)) * (high - bottom - 12);
    const each = (wide - left - 8) / bars.length;
    const rect = (kind, number, from, to) => s("rect", { class: kind, x: left + number * each + each * 0.1,
      width: each * 0.8, y: py(to), height: Math.max(py(from) - py(to), 0) });
    const levels = [...new Set([top, 0, -low])];
    return h("figure", { class: "map" }, caption,
      h("div", { class: "dim" }, "in all layers; kept and uploaded above the line, dropped below"),
      s("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "Blocks by selection" },
        levels.flatMap((level) => [
          s("line", { class: "axis", x1: left, x2: wide - 8, y1: py(level), y2: py(level) }),
          s("text", { x: left - 5, y: py(level) + 4, "text-anchor": "end" }, count(Math.abs(level)))]),
        bars.map((bar, number) => s("g", {}, s("title", {}, `Selection ${bar.number}: ${count(bar.kept)} kept, `
          + `${count(bar.fresh)} uploaded, ${count(bar.dropped)} dropped`),
        rect("kept", number, 0, bar.kept), rect("fresh", number, bar.kept, bar.kept + bar.fresh),
        rect("dropped", number, -bar.dropped, 0))),
        s("text", { x: wide - 8, y: high - 6, "text-anchor": "end" }, `selection ${bars[bars.length - 1].number}`)));
  }

  // Terms stay null where nobody measured; the table says so and sorts them last.
  function decisionLog(course) {
    const caption = h("figcaption", {}, h("b", {}, "decisions"));
    const { columns, rows } = course.rounds;
    if (!rows.length) return h("figure", { class: "wide" }, caption, empty("No round was recorded."));
    const verdict = columns.indexOf("is_retained");
    const words = new Map([[true, "pays"], [false, "does not pay"], [null, "open"]]);
    const shown = ["round", "age_rounds", "action", "basis", "is_retained", "benefit_us", "cost_us", "margin_us",
      "horizon_rounds", "unmeasured"];
    const others = columns.filter((name) => !shown.includes(name));
    return h("figure", { class: "wide decisions" }, caption,
      empty("Before each round: is a new selection worth its cost? Benefit must exceed cost and margin; with a term unmeasured the decision is open and the basis says what was done instead."),
      makeTable({ columns, name: "decisions", shown: [...shown, ...others],
        rows: rows.map((row) => row.map((each, place) => (place === verdict ? words.get(each) : each))) }));
  }

  return (course) => [acceptanceChart(course), selectionChart(course), residencyMap(course), decisionLog(course)];
};
