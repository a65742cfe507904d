// Runs before the page is painted, so that it does not flash in the other theme.
const kept = localStorage.getItem("orc-theme");
if (kept) document.documentElement.dataset.theme = kept;
