"use strict";
// Draws the figures of the page.
(() => {
  const byId = (name) => document.getElementById(name);
  const root = document.documentElement;
  const darkSystem = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const CONFIG = { displaylogo: false, responsive: true, scrollZoom: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], displayModeBar: touch ? false : "hover" };
  const figures = JSON.parse(byId("figures").textContent);

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

  // The page of a run that goes on loads itself anew: not before it is drawn, which takes longer than
  // the time between on a slow machine, and not for ever, because a run that is killed cannot say so.
  function follow() {
    const when = document.querySelector(".when"), { refreshS, dueS } = when.dataset;
    if (refreshS === undefined) return;
    if (Date.now() < 1000 * dueS) return void setTimeout(() => location.reload(), 1000 * refreshS);
    const written = when.querySelector("time").textContent;
    when.textContent = `No update since ${written}; the run may have stopped. Load the page again to see.`;
  }

  byId("theme").addEventListener("change", (event) => chooseTheme(event.target.value, true));
  darkSystem.addEventListener("change", () => window.Plotly && draw());
  document.addEventListener("keydown", move);
  let kept = "";
  try { kept = localStorage.getItem("wye-theme") || ""; } catch { /* likewise */ }
  chooseTheme(kept, false);
  loadLibrary().then(draw).then(() => { root.dataset.drawn = "true"; }).catch((error) => say("The charts cannot be drawn: " + error.message + ". The tables have their numbers.")).then(follow);
})();
