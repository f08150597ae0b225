// The order of what the search finds: headings with the words of the query, pages for users, and the others.
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    const words = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().split(/\W+/);
    const inTitle = words.filter((word) => word.length > 2 && title.toLowerCase().includes(word.slice(0, 5)));
    score += 4 * inTitle.length;
    if (page.startsWith("docs/changelog")) return score - 40;
    if (anchor) return score + 20;
    if (/contributing|benchmarks|simulated_gpus/.test(page)) return score - 20;
    return score;
  },
  // As Sphinx has them.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
