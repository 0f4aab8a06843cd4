// Acts on versions that are on the host, each with what it does and loses, and the equal command.
//
// Invariant: whatever is lost is named before it is lost. A change names the tag (ETag) of the image that it was decided on.
import { api, type Catalog, type ImageDetails, type Operation } from "./api/client.ts";
import { line } from "./commands.ts";
import { isInRegistry, leftReason, lossText, publishLines, type Uses, type Version } from "./image-words.ts";
import { navigate } from "./router.ts";
import type { Act, ActField } from "./ui/dialog.tsx";
import { bytes, plural } from "./ui/format.ts";

/** An image with the tag that its next change must name. */
export interface Tagged {
  details: ImageDetails;
  etag: string | null;
}

const NAME = /^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$/;
export const nameReason = (text: string) =>
  NAME.test(text)
    ? null
    : "A name has 1 to 63 letters a to z, digits and hyphens, and no hyphen at its ends.";
/** A word of a command, or what stands for it until it is filled in. */
export const or = (text: string | undefined, placeholder: string) => text || placeholder;
export const ref = (v: Version) => `${v.image}:${v.version}`;

/** An act that begins long work says which operation it is, and goes to the image, whose page shows its progress. */
export const begins = {
  done: (begun: unknown) => `Operation ${(begun as Operation).id} has begun: ${(begun as Operation).what}.`,
  after: (begun: unknown) => {
    const image = (begun as Operation).image?.split(":")[0];
    navigate(image ? ["images", image] : ["operations"]);
  },
};

export const nameField: ActField = {
  key: "name",
  label: "Image",
  isRequired: true,
  hint: "A new name, or that of an image that gets another version.",
  check: nameReason,
};

export function storeField(stores: string[]): ActField {
  return {
    key: "store",
    label: "Store",
    options: [["", "first shared, then local"], ...stores.map((s): [string, string] => [s, s])],
  };
}

/** Publishes a version. `running` has the number of machines that run, by catalog. */
export function publishVersion(
  { etag }: Tagged,
  version: Version,
  catalogs: Catalog[],
  running: Map<string, number>,
): Act {
  return {
    title: `Publish ${ref(version)}?`,
    consequences: [
      ...publishLines(version.image, version.version, catalogs, running),
      "Requests that name no version mean this one from now on.",
    ],
    verb: "Publish",
    command: line("spillway", "image", "publish", ref(version)),
    run: () =>
      api.put("/v1/images/{name}/published", {
        path: { name: version.image },
        ifMatch: etag ?? undefined,
        body: { version: version.version },
      }),
    done: `${ref(version)} is published.`,
  };
}

/** Gives a version a tag, which another version may lose. */
export function tagVersion({ details, etag }: Tagged, version: Version): Act {
  const others = Object.entries(details.image.tags).filter(([, of]) => of !== version.version);
  return {
    title: `Tag ${ref(version)}`,
    consequences: [
      "A tag is a name for people. A version that has one cannot be deleted.",
      others.length
        ? `A tag names one version: ${others.map(([tag, of]) => `${tag} (version ${of})`).join(", ")} would move here.`
        : "No other version of the image has a tag.",
    ],
    verb: "Tag",
    fields: [
      {
        key: "tag",
        label: "Tag",
        isRequired: true,
        placeholder: "last-good",
        check: (text) =>
          details.image.tags[text] === version.version ? "The version has this tag." : nameReason(text),
      },
    ],
    command: (v) => line("spillway", "image", "tag", ref(version), or(v.tag, "TAG")),
    run: (v) =>
      api.put("/v1/images/{name}/tags/{tag}", {
        path: { name: version.image, tag: v.tag ?? "" },
        ifMatch: etag ?? undefined,
        body: { version: version.version },
      }),
    done: `${ref(version)} is tagged.`,
  };
}

export function removeTag({ etag }: Tagged, version: Version, tag: string): Act {
  return {
    title: `Remove the tag ${tag}?`,
    consequences: [
      `No version of ${version.image} is tagged ${tag} any more.`,
      `${ref(version)} stays. It can be deleted then, unless something else needs it.`,
    ],
    verb: "Remove",
    command: line("spillway", "image", "tag", version.image, tag),
    run: () =>
      api.delete("/v1/images/{name}/tags/{tag}", {
        path: { name: version.image, tag },
        ifMatch: etag ?? undefined,
      }),
    done: `The tag ${tag} is removed.`,
  };
}

export function verifyVersion(version: Version): Act {
  return {
    title: `Verify ${ref(version)}?`,
    consequences: [
      "All of the version is read, and compared with its digests. Machines go on.",
      `Reading ${bytes(version.stored_bytes)} takes part of the store's bandwidth.`,
    ],
    verb: "Verify",
    command: line("spillway", "image", "verify", ref(version)),
    run: async () =>
      (
        await api.post("/v1/images/{name}/versions/{version}/verify", {
          path: { name: version.image, version: version.version },
        })
      ).body,
    ...begins,
  };
}

/** Deletes a version. What was made on this host is kept nowhere else, as far as the host knows: its name has to be typed. */
export function deleteVersion({ details, etag }: Tagged, version: Version): Act {
  const isLast = details.versions.length === 1;
  return {
    title: `Delete ${ref(version)}?`,
    consequences: [
      `The content of the version is gone: ${bytes(version.stored_bytes)} in the store ${version.store}.`,
      lossText([version]),
      ...(isLast ? [`It is the last version: the image ${version.image} is gone with it.`] : []),
      "No catalog and no leftover uses it. The daemon refuses this while a machine or a commit does.",
    ],
    verb: "Delete",
    isDestructive: true,
    ...(isInRegistry(version) ? {} : { typed: ref(version) }),
    command: line("spillway", "image", "delete", ref(version)),
    run: () =>
      api.delete("/v1/images/{name}/versions/{version}", {
        path: { name: version.image, version: version.version },
        ifMatch: etag ?? undefined,
      }),
    done: `${ref(version)} is deleted.`,
    ...(isLast ? { after: () => navigate(["images"]) } : {}),
  };
}

/** Why an image cannot be deleted; null if the daemon is to decide. */
export function deleteImageReason({ versions }: ImageDetails, uses: Map<number, Uses>): string | null {
  if (versions.some((v) => v.state === "importing"))
    return "A version is being made: wait for it, or cancel it.";
  const of = [...uses.values()];
  const catalogs = new Set(of.flatMap((u) => [...u.next, ...u.before]));
  if (catalogs.size)
    return `${plural(catalogs.size, "catalog uses", "catalogs use")} it: ${[...catalogs].sort().join(", ")}.`;
  const left = of.flatMap((u) => u.left);
  return left.length ? leftReason(left) : null;
}

export function deleteImage({ details, etag }: Tagged): Act {
  const { image, versions } = details;
  const stored = versions.reduce((sum, v) => sum + v.stored_bytes, 0);
  const tags = Object.keys(image.tags);
  return {
    title: `Delete the image ${image.name}?`,
    consequences: [
      `${plural(versions.length, "version is", "versions are")} gone: ${versions.map((v) => v.version).join(", ")}; ${bytes(stored)} on disk.`,
      lossText(versions),
      ...(tags.length ? [`Its tags are gone: ${tags.join(", ")}.`] : []),
      "No catalog and no leftover uses it. The daemon refuses this while a machine or a commit does.",
    ],
    verb: "Delete",
    isDestructive: true,
    ...(versions.every(isInRegistry) ? {} : { typed: image.name }),
    command: line("spillway", "image", "delete", image.name),
    run: () => api.delete("/v1/images/{name}", { path: { name: image.name }, ifMatch: etag ?? undefined }),
    done: `The image ${image.name} is deleted.`,
    after: () => navigate(["images"]),
  };
}
