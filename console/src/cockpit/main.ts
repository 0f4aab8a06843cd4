// Loaded by pages of Cockpit alone, before the console: gives the console its way to the daemon.
import type { Cockpit } from "./cockpit";
import { CockpitTransport } from "./transport.ts";

const own = globalThis as unknown as { cockpit: Cockpit; spillwayTransport?: CockpitTransport };
own.spillwayTransport = new CockpitTransport(own.cockpit);
