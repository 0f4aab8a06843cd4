// What the fleet's pages have from the rest of the console. They are a file of their own, which is loaded where there is a fleet, and
// build.mjs gives them these very parts (state/fleet.ts) in place of copies.
//
// Invariant: whatever has a state is here, as a copy of it would be another one. What has none, such as formats, may be copied.
export { Fragment, jsx, jsxs } from "preact/jsx-runtime";
export { ask } from "./acts.ts";
export { ApiError, api, raw } from "./api/client.ts";
export { href, navigate, queryValue, route } from "./router.ts";
export { shownHost } from "./shown-host.ts";
export { useList, useObject } from "./state/resource.ts";
export { against, lacks } from "./state/session.ts";
export { now } from "./state/visible.ts";
export {
  Badge,
  Choice,
  Command,
  Facts,
  Filter,
  Notice,
  PageHead,
  Panel,
  Pending,
  Tabs,
} from "./ui/parts.tsx";
export { StackedBar } from "./ui/planes.tsx";
export { FIELDS, shown } from "./ui/spec-form.tsx";
export { Table } from "./ui/table.tsx";
