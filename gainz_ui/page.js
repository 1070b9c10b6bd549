// The page's own script, inlined into the document ahead of Gradio: it needs no eval, so the page runs under a strict CSP.
(function () {
  'use strict';
  var html = document.documentElement, COOKIE = '@cookie@', SCHEME = '@scheme@';

  function keep(language) { document.cookie = COOKIE + '=' + language + '; path=/; max-age=31536000; SameSite=Strict'; }

  // Language: Gradio reads navigator.language while its bundle starts, so the choice is put there first.
  var found = document.cookie.match(new RegExp('(?:^|; )' + COOKIE + '=(en|zh)'));
  var chosen = found ? found[1] : '@default@' !== 'auto' ? '@default@' : (navigator.language || '').toLowerCase().indexOf('zh') === 0 ? 'zh' : 'en';
  var tag = chosen === 'zh' ? 'zh-CN' : 'en';
  Object.defineProperty(navigator, 'language', {get: function () { return tag; }, configurable: true});
  Object.defineProperty(navigator, 'languages', {get: function () { return [tag]; }, configurable: true});
  if (!found) { keep(chosen); }
  html.lang = tag;

  // Colours: Gradio takes them from the address; it goes back to what it was once the page stands.
  var scheme = null;
  try { scheme = localStorage.getItem(SCHEME); } catch (error) { /* storage is off: the system's scheme */ }
  if (scheme === 'dark' || scheme === 'light') {
    var address = new URL(location.href);
    address.searchParams.set('__theme', scheme);
    history.replaceState(null, '', address);
  }
  var standing = setInterval(function () {
    if (!document.querySelector('#gz-header')) { return; }
    clearInterval(standing);
    var plain = new URL(location.href);
    plain.searchParams.delete('__theme');
    history.replaceState(null, '', plain);
  }, 100);

  // A file that the server has written into a hidden element becomes a download; it never touches the server's disk.
  var taken = {};
  function download(place, tries) {
    var holder = document.querySelector('#gz-file-' + place + ' [data-name]');
    if (!holder || holder.dataset.serial === taken[place]) {
      if (tries > 0) { setTimeout(function () { download(place, tries - 1); }, 100); }
      return;
    }
    if (place !== 'doctor') { taken[place] = holder.dataset.serial; }
    save(new Blob([holder.textContent], {type: holder.dataset.kind}), holder.dataset.name);
  }
  function save(blob, name) {
    var link = document.createElement('a');
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(function () { URL.revokeObjectURL(link.href); }, 10000);
  }

  // A plot as PNG: its SVG layers as one picture on the card's colour, painted at twice the size. Nothing leaves the browser.
  function picture(place, name) {
    Array.prototype.forEach.call(document.querySelectorAll('[id^="gz-plot-' + place + '"] .js-plotly-plot'), function (plot) {
      var part = plot.closest('[id^="gz-plot-"]').id.slice('gz-plot-'.length + place.length);     // of several, each has its own name
      paint(plot.querySelectorAll('svg.main-svg'), name.replace('.png', part + '.png'));
    });
  }
  function paint(layers, name) {
    if (!layers.length || !layers[0].getClientRects().length) { return; }
    var box = layers[0].getBoundingClientRect(), whole = layers[0].cloneNode(true), image = new Image();
    for (var i = 1; i < layers.length; i++) {           // in one document, since layers refer to each other's gradients
      Array.prototype.forEach.call(layers[i].cloneNode(true).childNodes, function (part) { whole.appendChild(part.cloneNode(true)); });
    }
    whole.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
    whole.setAttribute('width', box.width); whole.setAttribute('height', box.height);
    image.onload = function () {
      var canvas = document.createElement('canvas'), pen = canvas.getContext('2d');
      canvas.width = 2 * box.width; canvas.height = 2 * box.height;
      pen.fillStyle = getComputedStyle(document.querySelector('.gz-card')).getPropertyValue('--gz-card');
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(function (blob) { save(blob, name); }, 'image/png');
    };
    var text = new XMLSerializer().serializeToString(whole).replace(/url\((&quot;|['"])?[^)#]*#/g, 'url($1#');   // gradients: of this document
    image.src = 'data:image/svg+xml;charset=utf-8,' + encodeURIComponent(text);
  }

  var clicks = {
    'gz-language': function () { keep(html.lang.indexOf('zh') === 0 ? 'en' : 'zh'); location.reload(); },
    'gz-scheme': function () {
      var dark = document.body.classList.toggle('dark');
      try { localStorage.setItem(SCHEME, dark ? 'dark' : 'light'); } catch (error) { /* storage is off: until the next load */ }
    },
    'gz-export-md': function () { download('chat', 100); },
    'gz-export-json': function () { download('chat', 100); },
    'gz-compare-save': function () { download('compare', 100); },
    'gz-quality-csv': function () { download('quality', 100); },
    'gz-quality-json': function () { download('quality', 100); },
    'gz-quality-png': function () { picture('quality', 'gainz-quality.png'); },
    'gz-bench-json': function () { download('bench', 100); },
    'gz-bench-csv': function () { download('bench', 100); },
    'gz-bench-md': function () { download('bench', 100); },
    'gz-bench-llama': function () { download('bench', 100); },
    'gz-bench-benchstat': function () { download('bench', 100); },
    'gz-bench-png': function () { picture('bench', 'gainz-bench.png'); },
    'gz-doctor-save': function () { download('doctor', 100); }
  };
  document.addEventListener('click', function (event) {
    var button = event.target.closest && event.target.closest('button[id]');
    if (button && Object.prototype.hasOwnProperty.call(clicks, button.id)) { clicks[button.id](); }
  });

  // Accepted draft tokens are tinted as ranges over the rendered answer: its text stays as it is, for copying and editing. What
  // was drafted comes as runs of text; their letters and digits are found again in the answer, in order, whatever Markdown made
  // of the rest.
  var tinting = false, LETTER = /[\p{L}\p{N}]/u;
  function letters(root) {
    var walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), found = [], text = '', node;
    while ((node = walker.nextNode())) {
      var at = 0;
      for (var sign of node.data) {
        if (LETTER.test(sign)) { found.push([node, at, sign.length]); text += sign; if (sign.length === 2) { found.push([node, at, 2]); } }
        at += sign.length;
      }
    }
    return {places: found, text: text};
  }
  function tint() {
    tinting = false;
    if (!window.Highlight || !CSS.highlights) { return; }
    var holder = document.querySelector('#gz-stats [data-drafted]'), answers = document.querySelectorAll('#gz-chatbot .bot.message');
    if (!holder || !answers.length) { CSS.highlights.delete('gz-drafted'); return; }
    var all = letters(answers[answers.length - 1]), ranges = [], from = 0;
    JSON.parse(holder.dataset.drafted).forEach(function (run) {
      var wanted = Array.from(run[0]).filter(function (sign) { return LETTER.test(sign); }).join('');
      var at = wanted ? all.text.indexOf(wanted, from) : -1;
      if (at < 0 || at > from + 80) { return; }
      from = at + wanted.length;
      if (!run[1]) { return; }
      var first = all.places[at], last = all.places[from - 1], range = new Range();
      range.setStart(first[0], first[1]);
      range.setEnd(last[0], last[1] + last[2]);
      ranges.push(range);
    });
    CSS.highlights.set('gz-drafted', new Highlight(...ranges));
  }
  document.addEventListener('DOMContentLoaded', function () {
    new MutationObserver(function () {
      if (!tinting) { tinting = true; setTimeout(tint, 120); }
    }).observe(document.body, {childList: true, subtree: true, characterData: true, attributes: true, attributeFilter: ['data-drafted']});
  });

  // What is asked for again and again goes past Gradio, whose client takes a tenth of a second of a core for every event: header,
  // monitor and work under way come as HTML of the server's own, only what has changed, and only while they are in sight.
  var head = {mark: '', due: 0, pace: 2000, lost: 0, gone: '', version: null, told: 0}, watch = {mark: '', due: 0, pace: 5000};
  function place(id) { return document.getElementById(id); }
  function fetched(path, of, use, lost) {
    of.due = Infinity;
    fetch(path + '?seen=' + of.mark, {cache: 'no-store'}).then(function (answer) {
      if (answer.status === 204) { return null; }
      if (answer.status !== 200) { throw new Error(answer.status); }
      return answer.json();
    }).then(function (found) {
      if (found) { of.mark = found.mark; of.pace = 1000 * found.pace; }
      of.due = Date.now() + of.pace;
      use(found);
    }, function () { of.due = Date.now() + of.pace; lost(); });
  }
  function fill(holder, html) {
    if (holder) { holder.innerHTML = html; holder.hidden = !html; }
  }
  // A browser asks for a piece of script only once: a page that lacks one is loaded anew as soon as the server answers.
  var lacking = false;
  window.addEventListener('vite:preloadError', function () { lacking = true; });
  function anew() {
    var last = Number(sessionStorage.getItem('gainz-anew') || 0), now = Date.now();
    lacking = false;
    if (now - last < 60000) { return; }                              // it lacks it for another reason
    sessionStorage.setItem('gainz-anew', now);
    location.reload();
  }
  function state(found) {
    head.lost = 0;
    if (lacking) { anew(); return; }
    if (found) { fill(place('gz-state'), found.status); fill(place('gz-banner'), found.banner); head.gone = found.gone; head.version = found.version; }
    var known = document.querySelector('#gz-version input'), changed = place('gz-changed');     // what the page's widgets stand by
    if (known && changed && head.version !== null && +known.value !== head.version && Date.now() - head.told > 3000) {
      head.told = Date.now();
      changed.click();
    }
    var gate = place('gz-gate'), look = place('gz-gate-look');      // what stands in the chat's place while no model can answer
    if (found && look && gate && gate.getClientRects().length) { look.click(); }
  }
  function lost() {
    var chips = document.querySelector('#gz-state .gz-chips');
    head.lost += 1;
    if (head.lost > 1 && chips && head.gone) { chips.innerHTML = head.gone; head.mark = ''; }
  }
  function silent() { /* the header says that nobody answers */ }
  function board(found) {
    Object.entries(found ? found.parts : {}).forEach(function (part) { fill(place('gz-monitor-' + part[0]), part[1]); });
  }
  var place_seen = {mark: '', due: 0, pace: 1500, at: null};       // what a tab has under way, while it is in sight
  function under_way(now) {
    var open = Array.from(document.querySelectorAll('[data-place]')).find(function (one) { return one.getClientRects().length; });
    if (!open) { return; }
    if (place_seen.at !== open) { Object.assign(place_seen, {mark: '', due: now, at: open}); }
    function use(found) { if (found) { open.innerHTML = found.html; } }
    if (now >= place_seen.due) { fetched('page/place/' + open.dataset.place, place_seen, use, silent); }
  }
  function beat() {
    if (document.hidden) { return; }
    var bar = place('gz-state'), monitor = place('gz-monitor-tiles'), now = Date.now();
    if (bar && !bar.querySelector('.gz-chips')) { head.mark = ''; }
    if (bar && now >= head.due) { fetched('page/state', head, state, lost); }
    under_way(now);
    if (!monitor || !place('gz-monitor').getClientRects().length) { watch.due = Math.min(watch.due, now); return; }
    if (!monitor.firstChild) { watch.mark = ''; }
    if (now >= watch.due) { fetched('page/monitor', watch, board, silent); }
  }
  setInterval(beat, 250);
})();
