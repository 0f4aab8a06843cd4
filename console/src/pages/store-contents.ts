// What is on each store, as far as the API tells: versions of images, what catalogs put there, and leftovers.
//
// The API has no list of a store's files. Versions are read image by image, when a visible page shows them.
import { useEffect, useState } from "preact/hooks";
import { api, type Catalog, type Image, type ImageDetails, type Schemas, type Store } from "../api/client.ts";
import { hasKeptDisks } from "../image-words.ts";
import { bytes, plural } from "../ui/format.ts";

/** All images with their versions; undefined until they have been read. Read again when the list of images changes. */
export function useAllVersions(images: Image[] | undefined): ImageDetails[] | undefined {
  const [details, setDetails] = useState<ImageDetails[]>();
  const key = images && JSON.stringify(images);
  // The key stands for the images
  useEffect(() => {
    if (!images) return;
    const abort = new AbortController();
    void readAll(images, abort.signal).then(setDetails, () => {});
    return () => abort.abort();
  }, [key]);
  return details;
}

/** Reads them some at a time: a host may have many. Images that are gone meanwhile are left out. */
async function readAll(images: Image[], signal: AbortSignal): Promise<ImageDetails[]> {
  const found: ImageDetails[] = [];
  const waiting = [...images];
  const reader = async () => {
    for (let next = waiting.shift(); next && !signal.aborted; next = waiting.shift()) {
      try {
        found.push((await api.get("/v1/images/{name}", { path: { name: next.name }, signal })).body);
      } catch (error) {
        if (signal.aborted) throw error;
      }
    }
  };
  await Promise.all([reader(), reader(), reader()]);
  return found.sort((a, b) => a.image.name.localeCompare(b.image.name));
}

/** The store that a catalog's disks are in: the named one, else the first of class local. */
function forDisks(stores: Store[], named: string | null | undefined): string | undefined {
  return named ?? stores.find((s) => s.class === "local")?.name;
}

/** Modes whose disks have no file there: in RAM alone, or a private copy in a store of another class. */
const NOT_THERE = new Set(["ram", "ephemeral"]);

/** What is on a store, a sentence each. */
export function contents(
  store: Store,
  stores: Store[],
  images: ImageDetails[],
  catalogs: Catalog[],
  leftovers: Schemas["Leftover"][],
): string[] {
  const versions = images.flatMap((i) => i.versions).filter((v) => v.store === store.name);
  const size = versions.reduce((sum, v) => sum + v.stored_bytes, 0);
  const disks = catalogs
    .filter(
      (c) => !NOT_THERE.has(c.spec.mode ?? "") && forDisks(stores, c.spec.overflow_store) === store.name,
    )
    .map((c) => `${c.name} (${hasKeptDisks(c.spec) ? "kept" : "overflow"})`);
  const data = catalogs
    .filter((c) => c.spec.data_disk_bytes != null && forDisks(stores, c.spec.data_disk_store) === store.name)
    .map((c) => c.name);
  const left = leftovers.filter((l) =>
    [l.disk?.path, l.data_disk].some((path) => path?.startsWith(`${store.path}/`)),
  );
  return [
    ...(versions.length
      ? [
          `${plural(versions.length, "version")} of images, ${bytes(size)}: ${versions.map((v) => `${v.image}:${v.version}`).join(", ")}.`,
        ]
      : []),
    ...(disks.length ? [`Disks of ${disks.join(", ")}.`] : []),
    ...(data.length ? [`Data disks of ${data.join(", ")}.`] : []),
    ...(left.length ? [`${plural(left.length, "leftover")}: ${left.map((l) => l.machine).join(", ")}.`] : []),
  ];
}

/** Versions that are streamed from a registry, which it cannot be removed for. */
export function streamedFrom(registry: string, images: ImageDetails[]): string[] {
  return images
    .flatMap((i) => i.versions)
    .filter((v) => v.residency && v.origin.kind === "registry" && v.origin.registry === registry)
    .map((v) => `${v.image}:${v.version}`);
}
