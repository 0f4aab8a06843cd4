// Whether the host is in a fleet, and the pages of the fleet: a file of their own, which is loaded only then.
//
// Invariant: a host without a fleet is asked once for each time that somebody comes to the page, and its console looks as if there
// were no fleets.
import { effect, signal, untracked } from "@preact/signals";
import type { VNode } from "preact";
import { ApiError, raw } from "../api/client.ts";
import * as shared from "../shared.ts";
import { awaySince, isSignedIn } from "./session.ts";
import { visible } from "./visible.ts";

export interface FleetPages {
  /** What the frame around every page has more: places of the fleet, and the choice of a host. */
  FleetPlaces(): VNode;
  FleetPage(): VNode;
}

export const fleetPages = signal<FleetPages | null>(null);
/** Why they are not there; null: it is not known yet. */
export const noFleet = signal<string | null>(null);
let isLooking = false;
let failures = 0;

async function look(): Promise<void> {
  if (isLooking || fleetPages.value) return;
  isLooking = true;
  try {
    await raw("GET", "/v1/fleet");
    Object.assign(globalThis, { spillwayShared: shared });
    // Browsers keep the failure of an address for as long as the page lives, so the next attempt has another one.
    const address = new URL(failures ? `fleet.js?again=${failures}` : "fleet.js", document.baseURI).href;
    fleetPages.value = await import(address).catch((error) => {
      failures++;
      throw error;
    });
  } catch (error) {
    noFleet.value = error instanceof ApiError ? error.message : "The pages of the fleet could not be loaded.";
  }
  isLooking = false;
}

/** Looks for a fleet whenever the page comes back to somebody, or the daemon to the page. */
export function startFleet(): void {
  effect(() => {
    if (isSignedIn.value && visible.value && awaySince.value === null) untracked(() => void look());
  });
}
