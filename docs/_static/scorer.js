/* How the search of the site ranks pages, see html_search_scorer. A page whose title has all words of the query comes first. Of pages
   that are equal otherwise, guides come before the reference. The numbers of Sphinx: a word in a heading 15, in the text 5. */
const GROUPS = { guides: 3, integrations: 2, production: 2, recipes: 2, migrating: 1 };
const stems = (text) => {
  const stemmer = new Stemmer();
  return splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word));
};

var Scorer = {
  score: ([page, title, , , score, , kind]) => {
    const words = new Set(stems(title.split(" > ")[0]));
    const query = new URLSearchParams(window.location.search).get("q") ?? "";
    const found = kind !== "object" && stems(query).every((word) => words.has(word));
    return score + (found ? 10 : 0) + (GROUPS[page.split("/")[1]] ?? 0);
  },

  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,

  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
