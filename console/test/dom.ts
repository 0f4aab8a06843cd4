// As much of a browser as the modules look at when they are loaded. To be imported before them.
const target = { addEventListener() {} };
Object.assign(globalThis, {
  document: {
    ...target,
    visibilityState: "visible",
    documentElement: { removeAttribute() {}, dataset: {} },
    baseURI: "http://localhost/",
  },
  matchMedia: () => ({ ...target, matches: false }),
  ...target,
  // Nothing repeats in a test, and nothing keeps its process alive.
  setInterval: () => 0,
});

export {};
