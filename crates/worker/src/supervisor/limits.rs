//! Settings that are to change while the disk serves. Owns which can; the settings that hold are the disk's.

use super::disk::Disk;
use spillway_control::{DiskSettings, Response, SettingFault};

/// The settings of a disk with this changed. An error says why it cannot be.
pub(super) fn changed(change: &DiskSettings, disk: &Disk) -> Result<DiskSettings, Response> {
    if *change == DiskSettings::default() {
        return Err(Response::error("invalid", "nothing to change was named"));
    }
    for (setting, is_named) in [("mode", change.mode.is_some()), ("base_cache", change.base_cache.is_some())]
    {
        if is_named {
            let why = format!("{setting} cannot change while the disk is served: serve it anew");
            return Err(Response::error("refused", why));
        }
    }
    let refused = |fault: SettingFault| Response::error("refused", fault.to_string());
    let now = disk.settings();
    DiskSettings { mode: now.mode, ..*change }.check().map_err(refused)?;
    let settings = now.changed(change);
    settings.check().map_err(refused)?;
    Ok(settings)
}
