// A table that sorts and filters, and draws no more rows than were asked for.
function makeTables({ h, show, label, badge }) {
  const ROWS_AT_ONCE = 200;

  function makeTable({ columns, rows, shown, onpick, onfilter, name }) {
    const places = shown.map((column) => columns.indexOf(column)).filter((place) => place >= 0);
    // Texts to filter by are made when they are asked for, or before that while nothing else is.
    const texts = [];
    const textOf = (number) => {
      texts[number] ??= rows[number].map((value, place) =>
        (value === null ? "" : `${columns[place]}=${value}`)).join(" ").toLowerCase();
      return texts[number];
    };
    function prepare(begin, time) {
      let number = begin;
      while (number < rows.length && time.timeRemaining() > 1) textOf(number++);
      if (number < rows.length) requestIdleCallback((next) => prepare(number, next));
    }
    if (window.requestIdleCallback) requestIdleCallback((time) => prepare(0, time));
    const numeric = new Set(places.filter((place) => rows.some((row) => typeof row[place] === "number")));
    let order = rows.map((_, number) => number);
    let sorted = { place: -1, sign: 1 };
    let limit = ROWS_AT_ONCE;
    let picked = -1;
    const search = h("input", { type: "search", "aria-label": `Filter ${name}`,
      placeholder: "Filter: words, or column=value", oninput: () => { limit = ROWS_AT_ONCE; filter(); } });
    const count = h("span", { class: "dim" });
    const more = h("button", { type: "button", onclick: () => { limit += ROWS_AT_ONCE; draw(); } }, "Show more");
    const heads = places.map((place) => h("th", { class: numeric.has(place) ? "number" : null, scope: "col" },
      h("button", { type: "button", onclick: () => sort(place) }, label(columns[place]))));
    const body = h("tbody", {});
    const box = h("div", {}, h("div", { class: "bar" }, search, count),
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body)),
      h("div", { class: "bar" }, more));

    function filter() {
      const terms = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      order = [];
      for (let number = 0; number < rows.length; number += 1) {
        if (terms.every((term) => textOf(number).includes(term))) order.push(number);
      }
      arrange();
      if (onfilter) onfilter(order);
    }
    function sort(place) {
      sorted = { place, sign: sorted.place === place ? -sorted.sign : 1 };
      arrange();
    }
    function arrange() {
      const { place, sign } = sorted;
      if (place >= 0) {
        order.sort((left, right) => {
          const [one, two] = [rows[left][place], rows[right][place]];
          if (one === two) return left - right;
          if (one === null || one === undefined) return 1; // what was not measured is last either way
          if (two === null || two === undefined) return -1;
          return (one < two ? -1 : 1) * sign;
        });
      }
      heads.forEach((head, number) => head.setAttribute("aria-sort",
        places[number] !== place ? "none" : sign > 0 ? "ascending" : "descending"));
      draw();
    }
    function draw() {
      const visible = order.slice(0, limit);
      body.replaceChildren(...visible.map((number) => h("tr", onpick ? { tabindex: "0",
        "aria-selected": String(number === picked), onclick: () => pick(number),
        onkeydown: (event) => { if (event.key === "Enter") pick(number); } } : {},
        places.map((place) => {
          const value = rows[number][place];
          return h("td", { class: numeric.has(place) ? "number" : null },
            columns[place] === "state" ? badge(value) : show(value, columns[place]));
        }))));
      count.textContent = `${order.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
      more.hidden = order.length <= limit;
    }
    function pick(number) {
      picked = number;
      draw();
      onpick(number);
    }
    arrange();
    return box;
  }

  return makeTable;
}
