// All images of the host.

import { ask } from "../acts.ts";
import type { Image } from "../api/client.ts";
import { api, newKey } from "../api/client.ts";
import { line } from "../commands.ts";
import { href, navigate, queryValue } from "../router.ts";
import { useList } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { now } from "../state/visible.ts";
import type { Act } from "../ui/dialog.tsx";
import { ago, clock } from "../ui/format.ts";
import { Filter, PageHead, Pending } from "../ui/parts.tsx";
import { type Column, Table } from "../ui/table.tsx";

const COLUMNS: Column<Image>[] = [
  {
    key: "name",
    title: "Image",
    sort: (i) => i.name,
    cell: (i) => <a href={href(["images", i.name])}>{i.name}</a>,
  },
  {
    key: "published",
    title: "Published",
    isFigure: true,
    sort: (i) => i.published ?? 0,
    cell: (i) => i.published ?? "none",
  },
  { key: "newest", title: "Newest", isFigure: true, sort: (i) => i.newest, cell: (i) => i.newest },
  {
    key: "tags",
    title: "Tags",
    cell: (i) =>
      Object.entries(i.tags)
        .map(([tag, version]) => `${tag}: ${version}`)
        .join(", ") || "-",
  },
  {
    key: "created",
    title: "First import",
    isFigure: true,
    sort: (i) => Date.parse(i.created),
    cell: (i) => (
      <time dateTime={i.created} title={clock(i.created)}>
        {ago(i.created, now.value)}
      </time>
    ),
  },
];

type Format = "raw" | "qcow2" | "vmdk" | "vhdx" | "vpc";
const isAddress = (from: string) => /^(https?|oci):\/\//.test(from);

/** Imports a file of the host, or one that the daemon downloads. */
function importImage(): Act {
  const key = newKey();
  return {
    title: "Import an image",
    consequences: [
      "The file is copied into a store of the host, and can be removed afterwards.",
      "The first version of an image is published. A later one is not, before somebody does.",
    ],
    verb: "Import",
    fields: [
      {
        key: "name",
        label: "Name",
        isRequired: true,
        hint: "A new name, or that of an image that gets another version.",
      },
      {
        key: "from",
        label: "File or address",
        isRequired: true,
        placeholder: "/path/to/debian.qcow2",
        hint: "On the host of the daemon, or https://, http:// or oci://.",
        check: (from) =>
          from.startsWith("/") || isAddress(from) ? null : "It is an absolute path or an address.",
      },
      {
        key: "format",
        label: "Format",
        options: ["qcow2", "raw", "vmdk", "vhdx", "vpc"].map((f): [string, string] => [f, f]),
        hint: "It is never guessed.",
      },
    ],
    command: (v) =>
      line("spillway", "image", "import", v.name || "NAME", v.from || "FILE", "--format", v.format),
    run: (v) => {
      const path = { name: v.name ?? "" };
      const format = v.format as Format;
      const from = v.from ?? "";
      return isAddress(from)
        ? api.post("/v1/images/{name}/downloads", { path, key, body: { url: from, format } })
        : api.post("/v1/images/{name}/versions", { path, key, body: { path: from, format } });
    },
    done: "The import has begun.",
    after: () => navigate(["operations"]),
  };
}

export function ImagesPage() {
  const list = useList<Image>("/v1/images");
  const text = (queryValue("filter") ?? "").toLowerCase();
  return (
    <>
      <PageHead
        title="Images"
        about="The read-only images that machines share"
        acts={
          can("admin") ? (
            <button type="button" class="primary" onClick={() => ask(importImage())}>
              Import
            </button>
          ) : null
        }
      />
      <div class="toolbar">
        <Filter label="Filter by name" />
      </div>
      {list.data ? (
        <Table
          label="Images"
          rows={list.data.filter((i) => i.name.toLowerCase().includes(text))}
          columns={COLUMNS}
          id={(i) => i.name}
          initial="name"
          empty={
            list.data.length
              ? "No image matches."
              : "There are no images yet. Import one from a file on the host."
          }
        />
      ) : (
        <Pending error={list.error} what="the images" />
      )}
    </>
  );
}
