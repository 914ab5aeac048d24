"use strict";
(() => {
  const root = document.documentElement, theme = document.getElementById("theme"), tip = document.getElementById("tip");
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  const dress = (name) => { root.dataset.theme = name; theme.textContent = name === "dark" ? "Light" : "Dark"; };
  dress(wanted.matches ? "dark" : "light");
  wanted.addEventListener("change", () => dress(wanted.matches ? "dark" : "light"));
  theme.addEventListener("click", () => dress(root.dataset.theme === "dark" ? "light" : "dark"));

  const valued = (cell) => { const text = cell.dataset.value; return text === "" ? null : isNaN(text) ? text : Number(text); };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const [x, y] = [valued(a.cells[column]), valued(b.cells[column])];
        if (x === null || y === null) return (x === null) - (y === null);
        return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
      });
      table.tBodies[0].append(...rows);
    }));
  }

  const hide = () => { tip.hidden = true; document.querySelectorAll(".pt.on").forEach((each) => each.classList.remove("on")); };
  const show = (point) => {
    hide();
    point.classList.add("on");
    tip.textContent = point.dataset.tip;
    tip.hidden = false;
    const box = point.getBoundingClientRect(), own = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(innerWidth - own.width - 4, box.left + box.width / 2 - own.width / 2)) + "px";
    tip.style.top = (box.top - own.height - 8 < 0 ? box.bottom + 8 : box.top - own.height - 8) + "px";
  };
  for (const plot of document.querySelectorAll(".plot")) {
    const points = () => [...plot.querySelectorAll(".pt")].filter((each) => !each.closest(".off"));
    const nearest = (event) => {
      let best = null, least = 900;
      for (const point of points()) {
        const box = point.getBoundingClientRect();
        const away = (box.left + box.width / 2 - event.clientX) ** 2 + (box.top + box.height / 2 - event.clientY) ** 2;
        if (away < least) [best, least] = [point, away];
      }
      best ? show(best) : hide();
    };
    plot.addEventListener("pointermove", nearest);
    plot.addEventListener("pointerdown", nearest);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    let at = -1;
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hide();
      const known = points();
      if (!step || !known.length) return;
      event.preventDefault();
      at = (at + step + known.length) % known.length;
      show(known[at]);
    });
  }
  for (const button of document.querySelectorAll("[data-toggle]")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const group of document.querySelectorAll(`g[data-series="${button.dataset.toggle}"]`)) group.classList.toggle("off", !shown);
    });
  }
  addEventListener("scroll", hide, { passive: true });
})();
