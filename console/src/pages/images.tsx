// All images of the host.
import type { Image } from "../api/client.ts";
import { href, queryValue } from "../router.ts";
import { useList } from "../state/resource.ts";
import { now } from "../state/visible.ts";
import { ago, clock } from "../ui/format.ts";
import { Command, Filter, PageHead, Pending } from "../ui/parts.tsx";
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

export function ImagesPage() {
  const list = useList<Image>("/v1/images");
  const text = (queryValue("filter") ?? "").toLowerCase();
  return (
    <>
      <PageHead title="Images" about="The read-only images that machines share" />
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
              : "There are no images yet. Import one with the command below."
          }
        />
      ) : (
        <Pending error={list.error} what="the images" />
      )}
      <Command
        label="An image is imported from a file on the host"
        text="spillway image import debian /path/to/debian.qcow2 --format qcow2"
      />
    </>
  );
}
