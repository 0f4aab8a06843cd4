// What the fleet's pages read: the fleet as the host sees it, its hosts and its catalogs.
//
// Invariant: what only the host that places knows is asked of that host; while it does not answer, the host that is asked says what it
// knows itself.
import { useList, useObject } from "../shared.ts";
import type { Loaded } from "../state/resource.ts";
import { type FleetCatalog, type FleetDetails, type FleetHost, placerPath } from "./words.ts";

/** Records change by themselves, and few events tell of that. */
const EVERY_MS = 4000;

export function useFleet(): Loaded<FleetDetails> {
  return useObject<FleetDetails>("/v1/fleet", EVERY_MS);
}

/** The fleet as the host that places sees it; undefined if that is not known. */
export function usePlacersFleet(fleet: FleetDetails | undefined): FleetDetails | undefined {
  const of = useObject<FleetDetails>(placerPath(fleet, "/v1/fleet"), EVERY_MS);
  return placerPath(fleet, "") === null ? fleet : of.data;
}

/** What the host that places has at a path, or else what the host has that is asked. */
function first<T>(there: string | null, of: Loaded<T>, own: Loaded<T>): Loaded<T> {
  return there !== null && !of.error ? of : own;
}

/** Whether the host itself has to be asked. */
function isOwn(fleet: FleetDetails | undefined, there: string | null, error: Error | null): boolean {
  return fleet !== undefined && (there === null || error !== null);
}

function usePlacersList<T>(path: string): Loaded<T[]> {
  const fleet = useFleet();
  const there = placerPath(fleet.data, path);
  const of = useList<T>(there, EVERY_MS);
  const own = useList<T>(isOwn(fleet.data, there, of.error) ? path : null, EVERY_MS);
  return fleet.data ? first(there, of, own) : { ...own, error: fleet.error };
}

function usePlacersObject<T>(path: string): Loaded<T> {
  const fleet = useFleet();
  const there = placerPath(fleet.data, path);
  const of = useObject<T>(there, EVERY_MS);
  const own = useObject<T>(isOwn(fleet.data, there, of.error) ? path : null, EVERY_MS);
  return fleet.data ? first(there, of, own) : { ...own, error: fleet.error };
}

export const useHosts = () => usePlacersList<FleetHost>("/v1/fleet/hosts");
export const useHost = (name: string) =>
  usePlacersObject<FleetHost>(`/v1/fleet/hosts/${encodeURIComponent(name)}`);
export const useCatalogs = () => usePlacersList<FleetCatalog>("/v1/fleet/catalogs");
export const useCatalog = (name: string) =>
  usePlacersObject<FleetCatalog>(`/v1/fleet/catalogs/${encodeURIComponent(name)}`);
