// As much of a browser as the modules look at when they are loaded. To be imported before them.
const target = { addEventListener() {} };
Object.assign(globalThis, {
  ...target,
  document: {
    ...target,
    visibilityState: "visible",
    documentElement: { removeAttribute() {}, dataset: {} },
    baseURI: "http://localhost/",
  },
  matchMedia: () => ({ ...target, matches: false }),
  // Nothing repeats in a test, and nothing keeps its process alive.
  setInterval: () => 0,
});

export {};
