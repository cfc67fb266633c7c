// Draws the formulas of a page, which arithmatex marks.
document$.subscribe(({ body }) => {
  const delimiters = [
    { left: "\\(", right: "\\)", display: false },
    { left: "\\[", right: "\\]", display: true },
  ];
  renderMathInElement(body, { delimiters });
});
