// Whether the host is in a fleet, and the pages of the fleet: a file of their own, which is loaded only then.
//
// Invariant: a host without a fleet is asked once for each time that somebody comes to the page, and its console looks as if there
// were no fleets.
import { effect, signal, untracked } from "@preact/signals";
import type { VNode } from "preact";
import {
  ApiError,
  against,
  api,
  ask,
  Badge,
  Choice,
  Command,
  Facts,
  FIELDS,
  Filter,
  Fragment,
  href,
  jsx,
  jsxs,
  lacks,
  Notice,
  navigate,
  now,
  PageHead,
  Panel,
  Pending,
  queryValue,
  raw,
  route,
  StackedBar,
  shown,
  shownHost,
  Table,
  Tabs,
  useList,
  useObject,
} from "../shared.ts";
import { loadFile } from "./load-file.ts";
import { awaySince, isSignedIn } from "./session.ts";
import { visible } from "./visible.ts";

export interface FleetPages {
  /** What the frame around every page has more: places of the fleet, and the choice of a host. */
  FleetPlaces(): VNode;
  FleetPage(): VNode;
}

export const fleetPages = signal<FleetPages | null>(null);

/** Name by name, which is less to load than a module as an object. All of them: the type says so. */
const parts = (): typeof import("../shared.ts") => ({
  ApiError,
  against,
  api,
  ask,
  Badge,
  Choice,
  Command,
  Facts,
  FIELDS,
  Filter,
  Fragment,
  href,
  jsx,
  jsxs,
  lacks,
  Notice,
  navigate,
  now,
  PageHead,
  Panel,
  Pending,
  queryValue,
  raw,
  route,
  StackedBar,
  shown,
  shownHost,
  Table,
  Tabs,
  useList,
  useObject,
});

async function look(): Promise<void> {
  if (fleetPages.value) return;
  try {
    await raw("GET", "/v1/fleet");
    (globalThis as { spillwayShared?: unknown }).spillwayShared ??= parts();
    fleetPages.value = await loadFile<FleetPages>("fleet.js");
  } catch {
    // There is none, or it is looked for again when somebody comes back.
  }
}

/** Looks for a fleet whenever the page comes back to somebody, or the daemon to the page. */
export function startFleet(): void {
  effect(() => {
    if (isSignedIn.value && visible.value && awaySince.value === null) untracked(() => void look());
  });
}
