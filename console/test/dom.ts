// As much of a browser as the modules look at when they are loaded. To be imported before them.
const target = { addEventListener() {} };
const repeated: (() => void)[] = [];
/** What has become of the page: loaded anew, and what the browser's history says of it. */
export const browser = { reloads: 0, state: null as unknown };

Object.assign(globalThis, {
  ...target,
  document: {
    ...target,
    visibilityState: "visible",
    documentElement: { removeAttribute() {}, dataset: {} },
    baseURI: "http://localhost/",
  },
  location: {
    protocol: "https:",
    hash: "",
    reload: () => {
      browser.reloads++;
    },
  },
  history: {
    get state() {
      return browser.state;
    },
    replaceState: (state: unknown) => {
      browser.state = state;
    },
  },
  matchMedia: () => ({ ...target, matches: false }),
  ...target,
  // Nothing repeats in a test by itself, and nothing keeps its process alive.
  setInterval: (what: () => void) => repeated.push(what),
});

/** Does once what the page does repeatedly. */
export function repeat(): void {
  for (const what of repeated) what();
}
