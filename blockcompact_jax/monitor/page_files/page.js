(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const MAX_POINTS = 1000;
  const TABLE_COLUMNS = ["engine", "model", "dtype", "context_tokens", "budget", "policy", "retention",
    "ownership", "block_tokens", "draft_tokens", "reselect_every", "acceptance_rate", "tokens_per_round",
    "speedup_vs_full", "tokens_per_second", "tokens_identical_to_full", "attended_share_of_keys",
    "study.mass_kept", "study.path.pool_peak_bytes", "state", "file"];
  // An option that a run does not have was not left unmeasured.
  const OPTIONS = new Set(["engine", "policy", "retention", "ownership", "draft_tokens", "reselect_every",
    "reselect_every_tokens", "lookup_tokens", "layout", "attention", "temperature"]);
  const BYTE_COLUMNS = ["cpu_gather_bytes", "h2d_bytes", "unpack_bytes", "scatter_bytes",
    "resident_move_bytes"].map((name) => `metrics.${name}`);
  const SERIES = ["policy", "engine", "retention", "ownership", "model", "dtype", "context_tokens",
    "block_tokens", "file"];
  const MEASURES = ["acceptance_rate", "speedup_vs_full", "tokens_per_round", "tokens_per_second",
    "attended_share_of_keys", "study.mass_kept", "study.mass_kept_worst_layer", "study.oracle_recall",
    "study.path.resident_blocks", "study.path.pool_peak_bytes", "draft.mean_kl", "draft.top1_agreement",
    "numeric.mean_kl",
    ...data.runs.columns.filter((name) => /^tasks\..*\.(token_accuracy|agreement)$/.test(name))];
  const isShare = (name) => /\.top1_agreement$/.test(name) || /^(acceptance_rate|budget_share|attended_share_of_keys|study\.(mass_kept|oracle_recall)|tasks\.)/.test(name)
    && !/\.num_cases$/.test(name);

  // --- elements ---------------------------------------------------------------------------------
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
    return element;
  }
  const h = (tag, attributes, ...children) =>
    fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const section = (name) => document.getElementById(name);
  const empty = (text) => h("p", { class: "dim" }, text);

  function show(value, name = "") {
    if (value === null || value === undefined) return OPTIONS.has(name) ? "-" : "not measured";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return String(value);
    if (isShare(name)) return `${(100 * value).toFixed(1)} %`;
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  }
  const label = (name) => name.replace(/^(metrics|cost|seconds|memory_bytes|study\.path|study|tasks)\./, "").replaceAll("_", " ");
  const prose = (text) => text.split(/(`[^`]+`|\*[^*\s][^*]*\*)/).map((part) =>
    (part.startsWith("`") ? h("code", {}, part.slice(1, -1))
      : /^\*.+\*$/.test(part) ? h("em", {}, part.slice(1, -1)) : part));
  const badge = (state) =>
    h("span", { class: `state ${state === "not run" ? "open" : state}` }, state);
  const makeTable = makeTables({ h, show, label, badge });

  // --- contracts --------------------------------------------------------------------------------
  function drawContracts() {
    const board = data.board;
    const states = ["held", "failed", "not run"];
    const counts = Object.fromEntries(states.map((state) =>
      [state, board.contracts.filter((each) => each.state === state).length]));
    let chosen = null;
    const search = h("input", { type: "search", placeholder: "Filter contracts", "aria-label":
      "Filter contracts", oninput: draw });
    const buttons = states.map((state) => h("button", { type: "button", "aria-pressed": "false",
      onclick: () => { chosen = chosen === state ? null : state; draw(); } },
      badge(state), ` ${counts[state]}`));
    const list = h("div", {});
    const when = board.created
      ? `Tests ran ${Object.values(board.runs).filter(Boolean).map((t) => t.slice(0, 19)).join(", ")}; `
        + `checked ${board.created}; seed ${show(board.seed).replace("not measured", "not known")}.`
      : "No checks were given: nothing is known to hold.";
    section("contracts").append(empty(when), h("div", { class: "bar" }, buttons, search), list);
    if (board.changed_after_the_run && board.changed_after_the_run.length) {
      list.before(empty(`${board.changed_after_the_run.length} files changed after the run; what passed with others is not shown as held.`));
    }
    drawAreas(board.areas);

    function draw() {
      buttons.forEach((button, place) =>
        button.setAttribute("aria-pressed", String(states[place] === chosen)));
      const terms = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      list.replaceChildren();
      let family = "";
      for (const contract of board.contracts) {
        const text = `${contract.number} ${contract.text} ${contract.tests.join(" ")}`.toLowerCase();
        if ((chosen && contract.state !== chosen) || !terms.every((term) => text.includes(term))) continue;
        if (contract.family !== family) {
          family = contract.family;
          list.append(h("h3", {}, `${family} · ${contract.family_title}`));
        }
        list.append(contractCard(contract));
      }
    }
    draw();
  }

  // What is inside is made when it is first opened.
  function unfolded(summary, make) {
    const box = h("details", {}, summary);
    box.addEventListener("toggle", () => {
      if (box.children.length === 1) box.append(h("div", {}, make()));
    });
    return box;
  }
  function contractCard(contract) {
    const { passed, failed } = contract.num_tests;
    const open = contract.num_tests["not run"];
    const counted = `${contract.tests.length} ${contract.tests.length === 1 ? "test" : "tests"}: ${passed} passed, ${failed} failed, ${open} not run`;
    const card = unfolded(h("summary", {}, h("b", {}, contract.number), badge(contract.state),
      h("span", { class: "text" }, prose(contract.text)), h("span", { class: "dim" }, counted)),
    () => [contract.reasons.length ? h("p", {}, contract.reasons.join("; ")) : null,
      h("ul", {}, contract.tests.map((name) => testItem(name)))]);
    card.dataset.number = contract.number;
    return card;
  }

  function testItem(name) {
    const test = data.board.tests[name];
    const source = (data.board.sources || {})[name.split("::")[0]] || "";
    const cases = `${test.num_cases.passed} passed, ${test.num_cases.failed} failed, `
      + `${test.num_cases.skipped} skipped, ${show(test.seconds)} s`;
    return h("li", {}, badge(test.state), ` ${name} `,
      h("span", { class: "dim" }, `${cases}; SHA-256 of the file ${source.slice(0, 12)}`));
  }

  function drawAreas(areas) {
    if (!areas.length) return;
    const rows = areas.map((area) => h("tr", {}, h("td", {}, area.area), h("td", {}, badge(area.state)),
      ["passed", "failed", "skipped"].map((name) => h("td", { class: "number" }, show(area.num_cases[name]))),
      h("td", { class: "number" }, show(area.num_tests_not_in_results)),
      h("td", {}, area.reasons.join("; ").slice(0, 160))));
    const heads = ["area", "state", "passed", "failed", "skipped", "not in the run", "why"];
    section("contracts").append(h("h3", {}, "What ran where"), h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", {}, head)))), h("tbody", {}, rows))));
  }

  // --- runs -------------------------------------------------------------------------------------
  const runs = data.runs;
  const place = (name) => runs.columns.indexOf(name);
  const value = (number, name) => (place(name) < 0 ? null : runs.rows[number][place(name)]);
  const varies = (name) => new Set(runs.rows.map((row) => row[place(name)])).size > 1;
  const naming = ["engine", "retention", "ownership"].filter((name) => place(name) >= 0 && varies(name));
  const nameOf = (number) => ["model", "dtype", "context_tokens", "budget", "policy", ...naming]
    .map((name) => value(number, name)).filter((part) => part !== null && part !== undefined).join(" · ")
    + ` (${number + 1})`;
  let filtered = runs.rows.map((_, number) => number);
  let selected = 0;
  const sides = { A: 0, B: Math.min(1, runs.rows.length - 1) };

  function drawRuns() {
    if (data.is_one_run) return drawRun();
    if (!runs.rows.length) {
      for (const name of ["runs", "charts", "run", "compare"]) {
        section(name).append(empty("No run in the results. Make some with `blockcompact sweep`."));
      }
      return;
    }
    section("runs").append(makeTable({ ...runs, shown: TABLE_COLUMNS, name: "runs",
      onpick: (number) => { selected = number; drawRun(); },
      onfilter: (order) => { filtered = order.slice().sort((left, right) => left - right); drawCharts(); } }));
    prepareCharts();
    drawCharts();
    drawRun();
    drawCompare();
  }

  // --- charts -----------------------------------------------------------------------------------
  let measure; let series; let figures;
  function prepareCharts() {
    const options = (names) => names.filter((name) => place(name) >= 0)
      .map((name) => h("option", { value: name }, label(name)));
    measure = h("select", { "aria-label": "Measure", onchange: drawCharts }, options(MEASURES));
    series = h("select", { "aria-label": "Series", onchange: drawCharts }, options(SERIES));
    series.value = SERIES.find((name) => place(name) >= 0 && varies(name)) || series.value;
    figures = h("div", { class: "charts" });
    section("charts").append(h("div", { class: "bar" }, "Measure", measure, "Colour", series), figures);
  }

  function drawCharts() {
    const moved = (number) => sum(["metrics.h2d_bytes", "metrics.resident_move_bytes"], number);
    figures.replaceChildren(
      scatter(`${label(measure.value)} against budget`, {
        x: (number) => value(number, "budget_share"), y: (number) => value(number, measure.value),
        xLabel: "share of the context that stays resident", yLabel: label(measure.value) }),
      scatter("blocks released against bytes moved", {
        x: moved, y: (number) => value(number, "metrics.physical_blocks_released"),
        xLabel: "bytes uploaded and moved within the pool", yLabel: "physical blocks released" }));
  }
  function sum(names, number) {
    const parts = names.map((name) => value(number, name));
    return parts.some((part) => typeof part !== "number") ? null : parts.reduce((left, right) => left + right, 0);
  }

  function scatter(title, { x, y, xLabel, yLabel }) {
    const points = filtered.map((number) => ({ number, x: x(number), y: y(number) }))
      .filter((point) => typeof point.x === "number" && typeof point.y === "number");
    const caption = h("figcaption", {}, h("b", {}, title));
    if (!points.length) return h("figure", {}, caption, empty("not measured"));
    const drawn = points.slice(0, MAX_POINTS);
    const [width, height, left, bottom] = [440, 260, 56, 38];
    const high = (name) => niceCeiling(Math.max(...drawn.map((point) => point[name]), 0)) || 1;
    const [xHigh, yHigh] = [high("x"), high("y")];
    const px = (number) => left + (number / xHigh) * (width - left - 12);
    const py = (number) => height - bottom - (number / yHigh) * (height - bottom - 10);
    const keys = [...new Set(drawn.map((point) => String(value(point.number, series.value))))];
    const shade = new Map(keys.map((key, number) => [key, `var(--s${number % 6})`]));
    const color = (point) => shade.get(String(value(point.number, series.value)));
    const marks = [0, 0.25, 0.5, 0.75, 1];
    const axes = marks.flatMap((mark) => [
      s("line", { class: "axis", x1: left, x2: width - 12, y1: py(mark * yHigh), y2: py(mark * yHigh) }),
      s("text", { x: left - 5, y: py(mark * yHigh) + 4, "text-anchor": "end" }, short(mark * yHigh)),
      s("text", { x: px(mark * xHigh), y: height - bottom + 15, "text-anchor": "middle" }, short(mark * xHigh))]);
    // One listener for all points, and a title only where the pointer is: there may be many.
    const dots = s("g", {
      onclick: (event) => { selected = drawn[event.target.dataset.place].number; drawRun(); },
      onmouseover: (event) => {
        if (event.target.firstChild || event.target.tagName !== "circle") return;
        const point = drawn[event.target.dataset.place];
        event.target.append(s("title", {},
          `${nameOf(point.number)}\n${xLabel}: ${show(point.x)}\n${yLabel}: ${show(point.y)}`));
      } }, drawn.map((point, place) => s("circle", { cx: px(point.x), cy: py(point.y), r: 5,
      fill: color(point), "fill-opacity": 0.35, stroke: color(point), "data-place": place })));
    const legend = h("div", { class: "legend" }, keys.slice(0, 12).map((key, number) =>
      h("span", {}, h("i", { style: `background: var(--s${number % 6})` }), key)));
    const more = points.length > drawn.length ? `${drawn.length} of ${points.length} runs; filter for others` : null;
    return h("figure", {}, caption, h("div", { class: "dim" }, `${yLabel}, over ${xLabel}`),
      s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, axes, dots,
        s("text", { x: width - 12, y: height - 4, "text-anchor": "end" }, xLabel)),
      legend, more ? empty(more) : null);
  }
  function niceCeiling(number) {
    if (number <= 0) return 0;
    const power = 10 ** Math.floor(Math.log10(number));
    return [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= number * 0.9999) * power;
  }
  const short = (number) => new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(number);

  // --- one run ----------------------------------------------------------------------------------
  const runPart = h("div", {});
  function drawRun() {
    if (!runPart.parentNode) section("run").append(runPart);
    const use = (side) => h("button", { type: "button", onclick: () => { sides[side] = selected; drawCompare(); } },
      `Compare as ${side}`);
    const costs = runs.columns.filter((name) => name.startsWith("cost."));
    const figures = [...MEASURES, "tokens_identical_to_full"].filter((name) => place(name) >= 0)
      .map((name) => `${label(name)} ${show(value(selected, name), name)}`);
    const course = data.courses[selected];
    runPart.replaceChildren(h("div", { class: "bar" }, h("b", {}, nameOf(selected)), data.is_one_run ? null : [use("A"), use("B")]),
      empty(figures.join(" · ")),
      h("div", { class: "charts" },
        h("figure", {}, h("figcaption", {}, h("b", {}, "bytes by kind")),
          empty("Each kind is booked under its own name; a zero in one says nothing about another."),
          meter(BYTE_COLUMNS)),
        h("figure", {}, h("figcaption", {}, h("b", {}, "cost of all retentions, by term")), waterfall(costs)),
        course ? courseViews(course)
          : empty("No course was recorded. `blockcompact run --report` and `--course` record one.")),
      h("details", {}, h("summary", {}, "All values"), h("div", {}, valueTable(runs.columns.map((name) =>
        [label(name), show(value(selected, name), name)]), ["value", ""]))));
  }
  function meter(names) {
    const highest = Math.max(...names.map((name) => value(selected, name) || 0), 1e-9);
    return h("div", { class: "meter" }, names.map((name) => bar(label(name), value(selected, name), 0, highest)));
  }
  // Each term begins where the one before ends; what nobody measured has no bar and is in no sum.
  function waterfall(names) {
    const known = names.map((name) => value(selected, name)).filter((each) => typeof each === "number");
    const total = known.reduce((left, right) => left + right, 0);
    let begin = 0;
    const bars = names.map((name) => {
      const drawn = bar(label(name), value(selected, name), begin, total || 1e-9);
      begin += value(selected, name) || 0;
      return drawn;
    });
    const all = known.length === names.length ? "all terms" : `measured terms (${known.length} of ${names.length})`;
    return h("div", { class: "meter waterfall" }, bars, bar(all, known.length ? total : null, 0, total || 1e-9));
  }
  function bar(text, each, begin, whole) {
    const known = typeof each === "number";
    return [h("span", {}, text), h("div", { class: "track" },
      h("div", { style: `margin-left: ${(100 * begin) / whole}%; width: ${known ? (100 * each) / whole : 0}%` })),
      h("span", { class: known ? "value" : "value unmeasured" }, known ? show(each) : each ?? "unmeasured")];
  }
  const valueTable = (rows, heads) => h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell)))))));

  // --- two runs ---------------------------------------------------------------------------------
  const comparePart = h("div", {});
  function drawCompare() {
    if (!comparePart.parentNode) section("compare").append(comparePart);
    const skip = new Set(["created", "configuration_hash", "file"]);
    const rows = runs.columns.filter((name) => !skip.has(name)).map((name) =>
      [name, value(sides.A, name), value(sides.B, name)]).filter(([, one, two]) => one !== two);
    const ratio = (one, two) => (typeof one === "number" && typeof two === "number" && one !== 0
      ? (two / one).toLocaleString("en", { maximumSignificantDigits: 3 }) : "");
    comparePart.replaceChildren(
      h("p", {}, h("b", {}, "A "), nameOf(sides.A), h("br", {}), h("b", {}, "B "), nameOf(sides.B)),
      rows.length ? valueTable(rows.map(([name, one, two]) =>
        [label(name), show(one, name), show(two, name), ratio(one, two)]), ["value", "A", "B", "B / A"])
        : empty("Every value is the same."));
  }

  // --- benchmarks, sources, frame ---------------------------------------------------------------
  function drawBenchmarks() {
    if (!data.benchmarks.length) section("benchmarks").append(empty("No benchmark in the results."));
    for (const benchmark of data.benchmarks) {
      const facts = Object.entries(benchmark.origin).map(([name, each]) => `${name}: ${each}`).join(" · ");
      section("benchmarks").append(h("h3", {}, benchmark.file), empty(facts));
      for (const table of benchmark.tables) {
        section("benchmarks").append(unfolded(h("summary", {}, h("b", {}, table.name), `${table.rows.length} rows`),
          () => makeTable({ ...table, shown: table.columns, name: table.name })));
      }
    }
  }
  function drawSources() {
    const versions = Object.entries(data.versions).map(([name, each]) => `${name} ${each || "not installed"}`);
    section("sources").append(
      empty(`Page made ${data.created} on ${data.machine.processor}, ${data.machine.num_cpus} processors. `
        + versions.join(", ")),
      valueTable(data.sources.map((source) => [source.name, source.sha256]), ["file", "SHA-256"]));
  }
  function drawFrame() {
    document.querySelector("nav").append(...[...document.querySelectorAll("main > section")].map((each) =>
      h("a", { href: `#${each.id}` }, each.querySelector("h2").textContent)));
    document.getElementById("theme").addEventListener("click", () => {
      const isDark = document.documentElement.dataset.theme
        ? document.documentElement.dataset.theme === "dark"
        : matchMedia("(prefers-color-scheme: dark)").matches;
      document.documentElement.dataset.theme = isDark ? "light" : "dark";
    });
  }

  const courseViews = makeCourseViews({ h, s, show, empty, makeTable });
  // The page of one run has only what that run gave.
  if (!data.board) section("contracts").remove();
  if (data.is_one_run) for (const name of ["runs", "charts", "compare", "benchmarks"]) section(name).remove();
  drawFrame();
  if (data.board) drawContracts();
  drawRuns();
  if (!data.is_one_run) drawBenchmarks();
  drawSources();
})();
