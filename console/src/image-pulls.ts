// Acts between this host and registries: a version is pulled, streamed, pushed.
import { api, keysByContent, newKey, type Schemas } from "./api/client.ts";
import { line } from "./commands.ts";
import { begins, nameReason, or, ref, storeField } from "./image-acts.ts";
import { isWritable, type Registry, type Version } from "./image-words.ts";
import type { Act, ActField, Values } from "./ui/dialog.tsx";

type Residency = Schemas["Residency"];

const IMAGE_REF = /^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(:[1-9][0-9]{0,9})?$/;

/** What of a version comes to the host, and when. */
const RESIDENCIES: [string, string][] = [
  ["", "copy all of it now"],
  ["lazy", "stream: chunks come when a disk reads them"],
  ["boot", "stream: what machines read at their start comes before"],
  ["full", "stream: all comes, in the background"],
];

/** Copies or streams a version from a registry. What is known already is no question. */
export function pullImage(
  registries: Registry[],
  stores: string[],
  known: { from?: { registry: string; image: string }; name?: string } = {},
): Act {
  const keyOf = keysByContent();
  const of = (v: Values) => ({
    registry: known.from?.registry ?? v.registry ?? "",
    image: known.from?.image ?? v.image ?? "",
    name: known.name ?? v.name ?? "",
  });
  /** The name here: that in the registry, if no other is given. */
  const nameOf = (v: Values) => of(v).name || (of(v).image.split(":")[0] ?? "");
  return {
    title: known.from
      ? `Pull ${known.from.registry}/${known.from.image}`
      : `Pull ${known.name ? `a version of ${known.name}` : "an image"}`,
    consequences: [
      "The version has the same number and digest here as in the registry.",
      "Machines do not take it before somebody publishes it, unless it is the first version of its image here.",
      "A streamed version needs the registry until all of it is here.",
    ],
    verb: "Pull",
    fields: [
      ...(known.from
        ? []
        : [
            {
              key: "registry",
              label: "Registry",
              options: registries.map((r): [string, string] => [r.name, r.name]),
            },
            {
              key: "image",
              label: "Version in the registry",
              isRequired: true,
              placeholder: "debian:3",
              hint: "Without a number it is the highest.",
              check: (text: string) =>
                IMAGE_REF.test(text) ? null : "It is the name of an image, or NAME:NUMBER.",
            },
          ]),
      ...(known.name
        ? []
        : [
            {
              key: "name",
              label: "Name here",
              placeholder: "the same",
              check: nameReason,
            } satisfies ActField,
          ]),
      { key: "residency", label: "How much comes", options: RESIDENCIES },
      storeField(stores),
    ],
    command: (v) => {
      const from = `${or(of(v).registry, "REGISTRY")}/${or(of(v).image, "IMAGE")}`;
      const store = v.store ? ["--store", v.store] : [];
      const isSame = nameOf(v) === (of(v).image.split(":")[0] ?? "");
      return isSame && !v.residency
        ? line("spillway", "image", "pull", from, ...store)
        : line(
            "spillway",
            "image",
            "import",
            or(nameOf(v), "NAME"),
            "--from",
            from,
            ...(v.residency ? ["--residency", v.residency] : []),
            ...store,
          );
    },
    run: async (v) => {
      const body = {
        registry: of(v).registry,
        image: of(v).image,
        ...(v.residency ? { residency: v.residency as Residency } : {}),
        ...(v.store ? { store: v.store } : {}),
      };
      return (await api.post("/v1/images/{name}/pulls", { path: { name: nameOf(v) }, key: keyOf(v), body })).body;
    },
    ...begins,
  };
}

/** Changes how much of a streamed version comes to the host: it is pulled again with another residency. */
export function changeResidency(
  version: Version,
  origin: { registry: string; image: string },
  to: Residency,
): Act {
  const key = newKey();
  const words: Record<Residency, string> = {
    lazy: "Chunks come when a disk reads them. Those that are here may be removed from the cache for others.",
    boot: "Chunks that machines read until they are ready come before, and stay in the cache.",
    full: "All chunks come in the background, and stay in the cache. When the version is complete, it does not need the registry any more.",
  };
  return {
    title: to === "full" ? `Fetch all of ${ref(version)}?` : `Stream ${ref(version)} with residency ${to}?`,
    consequences: [
      words[to],
      "A catalog that asks for more still gets it.",
      "The daemon refuses this if the cache is too small.",
    ],
    verb: to === "full" ? "Fetch" : "Change",
    command: line(
      "spillway",
      "image",
      "import",
      version.image,
      "--from",
      `${origin.registry}/${origin.image}`,
      "--residency",
      to,
    ),
    run: async () =>
      (
        await api.post("/v1/images/{name}/pulls", {
          path: { name: version.image },
          key,
          body: { registry: origin.registry, image: origin.image, residency: to },
        })
      ).body,
    ...begins,
  };
}

/** Copies a version to a registry. */
export function pushImage(version: Version, registries: Registry[]): Act {
  return {
    title: `Push ${ref(version)}`,
    consequences: [
      "The registry gets the version under this name and number, for all hosts that use it. A name is written once.",
      "Only chunks that the registry lacks are sent. If it is cancelled, it leaves no name there, and the next push goes on.",
      "It is not signed: a key never comes into a browser. To sign it, use the command with --sign KEY.",
    ],
    verb: "Push",
    fields: [
      {
        key: "registry",
        label: "Registry",
        options: registries.filter(isWritable).map((r): [string, string] => [r.name, `${r.name}, ${r.url}`]),
      },
    ],
    command: (v) => line("spillway", "image", "push", ref(version), or(v.registry, "REGISTRY")),
    run: async (v) =>
      (
        await api.post("/v1/images/{name}/versions/{version}/pushes", {
          path: { name: version.image, version: version.version },
          body: { registry: v.registry ?? "" },
        })
      ).body,
    ...begins,
  };
}
