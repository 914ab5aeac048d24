// Sphinx's own scores, except that an object whose full name is the query comes first.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([docname, title, anchor, description, score, filename, kind]) => {
    const query = (new URLSearchParams(window.location.search).get("q") || "").trim().toLowerCase().replace(/\(\)$/, "");
    const places = ["", "kinformer.", "kinformer.nn."].map(place => place + query);
    const place = kind === "object" ? places.indexOf(title.toLowerCase()) : -1;
    return place < 0 ? score : 1000 - place;
  },
};
