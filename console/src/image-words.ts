// Images, operations and stores in words: who uses a version, how much of it is here, why an act is not possible now, and what an
// operation has done. Pure: reads objects of the API, asks for nothing.
import type { Catalog, ImageDetails, Operation, Schemas, Store } from "./api/client.ts";
import { bytes, count, percent, plural } from "./ui/format.ts";

export type Version = Schemas["ImageVersion"];
export type Cached = Schemas["CachedVersion"];
export type Registry = Schemas["Registry"];

/** Who uses a version. */
export interface Uses {
  /** Catalogs whose machines take it at their next start. */
  next: string[];
  /** Other catalogs that had it, and may be rolled back to it. */
  before: string[];
  /** Deleted machines whose kept disks need it. */
  left: string[];
}

/** Who uses each version of an image, by its number. */
export function usesOf(
  name: string,
  catalogs: Catalog[],
  leftovers: Schemas["Leftover"][] = [],
): Map<number, Uses> {
  const uses = new Map<number, Uses>();
  const usesOfVersion = (version: number): Uses => {
    const of = uses.get(version) ?? { next: [], before: [], left: [] };
    uses.set(version, of);
    return of;
  };
  for (const { disk, machine } of leftovers)
    if (disk?.image === name) usesOfVersion(disk.version).left.push(machine);
  for (const catalog of catalogs) {
    const current = catalog.history.at(-1);
    const seen = new Set<number>();
    for (const entry of [...catalog.history].reverse()) {
      if (entry.image !== name || seen.has(entry.version)) continue;
      seen.add(entry.version);
      const of = usesOfVersion(entry.version);
      const isNext = current?.image === name && current.version === entry.version;
      (isNext ? of.next : of.before).push(catalog.name);
    }
  }
  return uses;
}

export function tagsOf(image: Schemas["Image"], version: number): string[] {
  return Object.entries(image.tags)
    .filter(([, of]) => of === version)
    .map(([tag]) => tag);
}

export function originText(origin: Schemas["Origin"]): string {
  if (origin.kind === "import") return origin.path;
  if (origin.kind === "registry") return `${origin.registry}/${origin.image}`;
  return `the disk of ${origin.machine}, over ${origin.from}`;
}

/** Whether the content can be had again elsewhere, so that a deletion here loses nothing that is kept. */
export function isInRegistry(version: Version): boolean {
  return version.origin.kind === "registry";
}

/** How much of a version the host has. */
export function residencyText(version: Version, cached: Cached | undefined): string {
  if (!version.residency) return "copied, whole";
  if (!cached) return "streamed; how much is here cannot be told now";
  if (cached.is_whole) return `streamed (${cached.residency}), complete`;
  const share = percent(cached.present_chunks / Math.max(1, cached.chunks), 0);
  return `streamed (${cached.residency}), ${share} is here`;
}

/** Why a version does not have the residency that it was imported with; empty if it has. */
export function askedText(version: Version, cached: Cached | undefined): string {
  if (!version.residency || !cached || version.residency === cached.residency) return "";
  return `It was imported with ${version.residency}. A catalog, or another version with the same content, asks for ${cached.residency}.`;
}

/** What a version can be used for now; null if it is ready. */
export function stateReason(version: Version): string | null {
  if (version.state === "ready") return null;
  return version.state === "importing"
    ? "It is being made: wait for the operation."
    : "It is being deleted: delete it again to end that.";
}

/** What needs a file of its own refuses a streamed version. */
export function copyReason(version: Version): string | null {
  if (!version.residency) return null;
  return "It is streamed: only a version that was copied can be read as a whole.";
}

/** Why what kept disks of deleted machines need stays. */
export const leftReason = (machines: string[]) =>
  `What ${machines.join(", ")} left needs it: delete that on the page of stores first.`;

/** Why a version cannot be deleted, as far as it can be told here; null if the daemon is to decide. */
export function deleteReason(details: ImageDetails, version: Version, uses: Uses | undefined): string | null {
  const { image, versions } = details;
  if (version.state === "importing") return "It is being made: cancel the operation instead.";
  if (image.published === version.version && versions.length > 1)
    return "It is published: publish another version first.";
  const names = [...(uses?.next ?? []), ...(uses?.before ?? [])];
  if (names.length)
    return `${names.join(", ")} ${names.length === 1 ? "has it in its" : "have it in their"} history, to which a catalog may be rolled back.`;
  if (uses?.left.length) return leftReason(uses.left);
  const [tag] = tagsOf(image, version.version);
  return tag ? `It is tagged ${tag}: remove the tag first.` : null;
}

/** What is lost with versions: whether it can be had again, and from where. */
export function lossText(versions: Version[]): string {
  const own = versions.filter((v) => !isInRegistry(v));
  if (own.length === 0)
    return "What is deleted was pulled from a registry, and can be pulled again while it is there.";
  const which = versions.length === 1 ? "It was" : `${plural(own.length, "version was", "versions were")}`;
  return `${which} made on this host. Unless you have pushed ${own.length === 1 ? "it" : "them"} to a registry, there is no other copy.`;
}

/** What the publication of a version does to each catalog that names the image. `running` has how many machines of a catalog run, if that is known. */
export function publishLines(
  name: string,
  version: number,
  catalogs: Catalog[],
  running: Map<string, number>,
): string[] {
  const ref = `${name}:${version}`;
  const lines: string[] = [];
  const pinned: string[] = [];
  for (const catalog of catalogs) {
    const [image, number] = catalog.spec.image.split(":");
    if (image !== name) continue;
    if (number) pinned.push(catalog.name);
    else if (catalog.version === version) lines.push(`${catalog.name} has ${ref} already.`);
    else {
      const on = running.get(catalog.name);
      const runs =
        on === undefined
          ? "Those that run are not restarted."
          : on === 0
            ? "None runs now."
            : `${plural(on, "runs", "run")} now, and ${on === 1 ? "is" : "are"} not restarted.`;
      lines.push(
        `${catalog.name}: ${plural(catalog.spec.count ?? 0, "machine takes", "machines take")} ${ref} instead of version ${catalog.version} at ${catalog.spec.count === 1 ? "its" : "their"} next start. ${runs}`,
      );
      if (catalog.rollout)
        lines.push(`The rollout of ${catalog.name} that is in progress continues with ${ref}.`);
      if (catalog.spec.type === "dedicated" || catalog.spec.reset === "never")
        lines.push(`Machines of ${catalog.name} keep their disks, and their version until they are reset.`);
    }
  }
  if (lines.length === 0) lines.push("No catalog follows the image: no machine takes the version by itself.");
  if (pinned.length)
    lines.push(
      `${pinned.join(", ")} ${pinned.length === 1 ? "names a version and stays" : "name a version and stay"} on it.`,
    );
  return lines;
}

/** The mode of the disks of a catalog's machines, if it is one that keeps them as files that can be committed. */
export function hasKeptDisks(spec: Catalog["spec"]): boolean {
  return (spec.mode ?? (spec.type === "dedicated" ? "persistent" : "")) === "persistent";
}

/** What an operation has found or sent; null if its end says all. */
export function outcomeText(operation: Operation): string | null {
  const { outcome } = operation;
  if (!outcome) return null;
  if ("pushed" in outcome) {
    const p = outcome.pushed;
    const had = p.was_there ? "The registry had it already. " : "";
    return `${had}${plural(p.chunks, "chunk")}: ${count(p.shared_chunks)} shared with other versions of it, ${count(p.found_chunks)} found there, ${count(p.sent_chunks)} sent (${bytes(p.sent_bytes)}).`;
  }
  const c = outcome.collected;
  const garbage = `${plural(c.versions, "version")}, ${plural(c.chunks, "chunk")} (${bytes(c.chunk_bytes)}). Garbage: ${plural(c.garbage_chunks, "chunk")} (${bytes(c.garbage_bytes)}), ${plural(c.garbage_images, "image")}, ${plural(c.dead_pushes, "interrupted push", "interrupted pushes")}.`;
  if (c.garbage_chunks + c.garbage_images + c.dead_pushes === 0) return garbage;
  if (c.has_deleted) return `${garbage} ${plural(c.deletable, "object was", "objects were")} deleted.`;
  return c.deletable
    ? `${garbage} ${plural(c.deletable, "object", "objects")} could be deleted now.`
    : `${garbage} Nothing can be deleted yet: garbage is recorded first, and deleted by a later collection.`;
}

/** How far an operation is, from 0 to 1; null while the size of its work is not known. */
export function progressOf(operation: Operation): number | null {
  if (operation.state.phase === "done") return 1;
  return operation.total_bytes > 0 ? Math.min(1, operation.done_bytes / operation.total_bytes) : null;
}

/** The free space below which a store has each level: the rule of docs/images.md, which the API does not return. */
export function marks(totalBytes: number): { warning: number; critical: number } {
  const gib = 2 ** 30;
  return { warning: Math.min(totalBytes * 0.2, 64 * gib), critical: Math.min(totalBytes * 0.1, 16 * gib) };
}

/** Why the space of a store is not shown. */
export function spaceText(store: Store): string {
  if (!store.space)
    return "Its space has not been measured, or its folder could not be read: is its file system mounted? A store that was just added is measured within seconds.";
  const { warning, critical } = marks(store.space.total_bytes);
  return `warning below ${bytes(warning)} free, critical below ${bytes(critical)}`;
}

/** Why an address of a registry is not allowed; null if the daemon is to decide. Addresses are shown, so they have no passwords. */
export function addressReason(url: string, isEndpoint = false): string | null {
  const [scheme, rest] = url.split("://");
  const known = isEndpoint ? ["https", "http"] : ["s3", "https", "http", "file"];
  if (rest?.split("/")[0]?.includes("@"))
    return "An address has no user and password: name a file of credentials.";
  if (!scheme || rest === undefined || !known.includes(scheme))
    return isEndpoint
      ? "It is https://HOST or http://HOST."
      : "It is s3://BUCKET/PREFIX, file:///FOLDER, https://HOST/PATH or http://HOST/PATH.";
  return /[\s?#\\]/.test(url) ? "An address has no spaces, ?, # or \\." : null;
}

/** Whether something can be pushed to a registry: not if it is a web server. */
export function isWritable(registry: Registry): boolean {
  return !/^https?:/.test(registry.url);
}
