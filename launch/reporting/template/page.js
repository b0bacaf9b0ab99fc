"use strict";
// Draws the figures of the page. `live` pages ask for new ones.
(() => {
  const byId = (name) => document.getElementById(name);
  const root = document.documentElement;
  const darkSystem = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const CONFIG = { displaylogo: false, responsive: true, scrollZoom: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], displayModeBar: touch ? false : "hover" };
  let figures = JSON.parse(byId("figures").textContent);

  function say(text) {
    byId("message").textContent = text;
    byId("message").hidden = false;
  }

  async function loadLibrary() {
    if (typeof DecompressionStream === "undefined") {
      throw new Error("this browser is too old to unpack them (Chrome 80, Firefox 113 or Safari 16.4 is needed)");
    }
    const packed = Uint8Array.from(atob(byId("library").textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  // A figure has no colours of text, grid and hover labels: those are the theme's.
  function themed(layout, width) {
    const css = getComputedStyle(root);
    const colour = (name) => css.getPropertyValue(name).trim();
    const own = structuredClone(layout);
    if (own.meta && width < 560) own.height += own.meta.narrow;
    own.font = { ...own.font, color: colour("--text"), family: "system-ui, sans-serif", size: 12 };
    own.hoverlabel = { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") }, namelength: 40 };
    own.modebar = { bgcolor: "rgba(0,0,0,0)", color: colour("--faint"), activecolor: colour("--accent"), orientation: "h" };
    own.dragmode = touch ? false : "zoom";
    for (const key of Object.keys(own).filter((k) => /^[xy]axis\d*$/.test(k))) {
      Object.assign(own[key], { gridcolor: colour("--grid"), linecolor: colour("--line"), tickcolor: colour("--line"), zerolinecolor: colour("--line") });
    }
    return own;
  }

  // Dark lines on a dark page: these have a brighter shade there.
  const BRIGHTER = { "#0072B2": "#4AA3DF", "#8C6BB1": "#B39DDB", "#6B4C9A": "#9B7FD0" };

  function coloured(data) {
    const dark = getComputedStyle(root).getPropertyValue("--dark").trim() === "1";
    const text = JSON.stringify(data);
    return JSON.parse(dark ? text.replace(/#0072B2|#8C6BB1|#6B4C9A/g, (own) => BRIGHTER[own]) : text);
  }

  async function draw() {
    for (const [name, figure] of Object.entries(figures)) {
      const place = byId("chart-" + name);
      if (place) await Plotly.react(place, coloured(figure.data), themed(figure.layout, place.clientWidth), CONFIG);
    }
  }

  // Keyboard: + and - zoom, arrows move, 0 shows all.
  function move(event) {
    const place = event.target;
    if (!place.classList || !place.classList.contains("chart") || !place._fullLayout || event.ctrlKey || event.metaKey || event.altKey) return;
    const axes = Object.keys(place._fullLayout).filter((k) => /^xaxis\d*$/.test(k));
    const [low, high] = place._fullLayout[axes[0]].range;
    const middle = (low + high) / 2, half = (high - low) / 2;
    const to = { "+": [middle - half / 1.5, middle + half / 1.5], "=": [middle - half / 1.5, middle + half / 1.5],
      "-": [middle - half * 1.5, middle + half * 1.5], ArrowLeft: [low - half / 3, high - half / 3],
      ArrowRight: [low + half / 3, high + half / 3], 0: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const change = {};
    for (const axis of axes) {
      if (to === null) change[axis + ".autorange"] = true; else change[axis + ".range"] = to;
    }
    if (to === null) for (const axis of Object.keys(place._fullLayout).filter((k) => /^yaxis\d*$/.test(k))) {
      const given = place.layout[axis];
      change[axis + ".autorange"] = given && given.autorange === "reversed" ? "reversed" : true;
    }
    Plotly.relayout(place, change);
  }

  function chooseTheme(value, keep) {
    if (value) root.dataset.theme = value; else delete root.dataset.theme;
    byId("theme").value = value || "";
    if (keep) try { localStorage.setItem("wye-theme", value); } catch { /* a page from a file may not */ }
    if (window.Plotly) draw();
  }

  async function refresh() {
    const began = performance.now();
    try {
      const answer = await fetch("update.json", { cache: "no-store" });
      if (!answer.ok) throw new Error((await answer.json()).error || answer.statusText);
      const update = await answer.json();
      figures = update.figures;
      byId("nav").innerHTML = update.nav;
      for (const [name, html] of Object.entries(update.sections)) replaceSection(name, html);
      for (const section of document.querySelectorAll("main > section")) {
        if (!(section.id in update.sections)) section.remove();
      }
      await draw();
      byId("live").textContent = "Live: " + new Date().toLocaleTimeString();
    } catch (error) {
      byId("live").textContent = "Not refreshed: " + error.message;
    }
    // a long run takes long to read: that must not slow it down
    setTimeout(refresh, Math.max(3000, 10 * (performance.now() - began)));
  }

  // Charts that are drawn keep their element, and with it their zoom; open tables stay open.
  function replaceSection(name, html) {
    const holder = document.createElement("template");
    holder.innerHTML = html;
    const fresh = holder.content.firstElementChild, old = byId(name);
    if (old && old.innerHTML === fresh.innerHTML) return;
    for (const chart of fresh.querySelectorAll(".chart")) {
      const drawn = byId(chart.id);
      if (!drawn) continue;
      drawn.setAttribute("aria-label", chart.getAttribute("aria-label"));
      const open = drawn.closest("figure").querySelector("details").open;
      chart.closest("figure").querySelector("details").open = open;
      chart.replaceWith(drawn);
    }
    if (old) old.replaceWith(fresh); else byId("main").append(fresh);
  }

  byId("theme").addEventListener("change", (event) => chooseTheme(event.target.value, true));
  darkSystem.addEventListener("change", () => window.Plotly && draw());
  document.addEventListener("keydown", move);
  let kept = "";
  try { kept = localStorage.getItem("wye-theme") || ""; } catch { /* likewise */ }
  chooseTheme(kept, false);
  loadLibrary().then(draw).then(() => {
    root.dataset.drawn = "true";
    if (byId("live")) setTimeout(refresh, 3000);
  }).catch((error) => say("The charts cannot be drawn: " + error.message + ". The tables have their numbers."));
})();
