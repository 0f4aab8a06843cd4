// The ways to another version of an image, as a page offers them.
import type { Catalog, ImageDetails } from "../api/client.ts";
import { commitMachine, committable, downloadImage, importFile } from "../image-imports.ts";
import { pullImage } from "../image-pulls.ts";
import { hasKeptDisks, type Registry } from "../image-words.ts";
import type { Offer } from "../ui/offers.tsx";

const NO_REGISTRY = "This host knows no registry: add one on the page of stores and registries.";

export function newVersionOffers(
  details: ImageDetails,
  catalogs: Catalog[],
  registries: Registry[],
  stores: string[],
): Offer[] {
  const { name } = details.image;
  return [
    {
      verb: "Import a file",
      about: "A disk image on the host of the daemon is copied into a store.",
      reason: null,
      act: () => importFile(stores, details),
    },
    {
      verb: "Download",
      about: "The daemon fetches a disk image from a web server or an OCI registry.",
      reason: null,
      act: () => downloadImage(stores, details),
    },
    {
      verb: "Pull",
      about: "A version in a registry is copied, or streamed.",
      reason: registries.length ? null : NO_REGISTRY,
      act: () => pullImage(registries, stores, { name }),
    },
    {
      verb: "Commit a machine's disk",
      about: "A machine of mode persistent that is off: its image with what it has written.",
      reason: catalogs.some((c) => hasKeptDisks(c.spec))
        ? null
        : "No catalog has machines of mode persistent, whose disks are kept.",
      act: async () => commitMachine(name, await committable(catalogs)),
    },
  ];
}
