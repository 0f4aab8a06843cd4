// As much of a browser as the modules look at when they are loaded. To be imported before them.
const target = { addEventListener() {} };
const repeated: (() => void)[] = [];
/** What has become of the page, and what it has told the other tabs of the browser. */
export const browser = { reloads: 0, told: [] as unknown[] };
const heard: ((message: { data: unknown }) => void)[] = [];

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
  BroadcastChannel: class {
    postMessage(data: unknown) {
      browser.told.push(data);
    }
    addEventListener(_: string, hear: (message: { data: unknown }) => void) {
      heard.push(hear);
    }
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

/** Another tab of the browser tells something. */
export function hear(data: unknown): void {
  for (const one of heard) one({ data });
}
