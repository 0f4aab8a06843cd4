// The URL's fragment as the state of the page: which page, and its sort, filter and tab. Nothing else keeps such state, so
// that a link shows the same to whoever opens it.
//
// Invariant: `route` always agrees with location.hash, and all of its links lead to the host that is shown, unless they name another.
import { computed, signal } from "@preact/signals";
import { hostOf, shownHost } from "./shown-host.ts";

export interface Route {
  /** Parts of the path, decoded: `["catalogs", "desk"]`. */
  parts: string[];
  query: URLSearchParams;
}

/** Reads a fragment such as `#/catalogs/desk?tab=sizing`. */
export function parseHash(hash: string): Route {
  const text = hash.replace(/^#\/?/, "");
  const mark = text.indexOf("?");
  const path = mark < 0 ? text : text.slice(0, mark);
  const parts = path.split("/").filter(Boolean).map(decode);
  if (hostOf(hash)) parts.shift();
  return { parts, query: new URLSearchParams(mark < 0 ? "" : text.slice(mark + 1)) };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** A fragment for a page of a host. Values that are empty are left out. */
export function href(
  parts: string[],
  query: Record<string, string | undefined> = {},
  host = shownHost,
): string {
  const pairs = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) if (value) pairs.set(key, value);
  const text = pairs.toString();
  return `#/${host ? `@${host}/` : ""}${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

const isBrowser = typeof window !== "undefined";
export const route = signal<Route>(parseHash(isBrowser ? location.hash : ""));
/** The page without its query: changes of it are changes of page. */
export const pageKey = computed(() => route.value.parts.join("/"));

if (isBrowser) {
  addEventListener("hashchange", () => {
    if (hostOf(location.hash) !== shownHost) location.reload();
    route.value = parseHash(location.hash);
  });
}

export function navigate(parts: string[], query: Record<string, string | undefined> = {}): void {
  location.hash = href(parts, query);
  // The event comes later. Until then the page of an object that was deleted would still be shown.
  route.value = parseHash(location.hash);
}

/** Changes parts of the query. A sort or a filter is no step that "back" should return to. */
export function setQuery(change: Record<string, string | undefined>, isStep = false): void {
  const query: Record<string, string | undefined> = Object.fromEntries(route.value.query);
  Object.assign(query, change);
  const to = href(route.value.parts, query);
  if (isStep) {
    location.hash = to;
    return;
  }
  history.replaceState(null, "", to);
  // The browser tells nobody of that: this page has to know, and Cockpit, whose own address follows.
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function queryValue(key: string): string | undefined {
  return route.value.query.get(key) ?? undefined;
}
