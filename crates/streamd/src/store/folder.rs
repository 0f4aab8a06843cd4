//! The list of a folder that is a registry. Owns the walk, which says each error: garbage collection takes what is not listed for
//! unused, and the walk of `object_store` leaves out what it cannot look at.

use spillway_registry::ListedObject;
use std::fs;
use std::io;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// All objects whose key begins with `key/`. A folder that was never made has none.
pub fn list(root: &Path, key: &str) -> io::Result<Vec<ListedObject>> {
    let mut listed = Vec::new();
    match fs::metadata(root.join(key)) {
        Ok(_) => walk(root, key, &mut listed)?,
        // A registry that is not there is an error, and not an empty one.
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            fs::metadata(root)?;
        }
        Err(e) => return Err(e),
    }
    Ok(listed)
}

fn walk(root: &Path, key: &str, listed: &mut Vec<ListedObject>) -> io::Result<()> {
    for entry in fs::read_dir(root.join(key))? {
        let entry = entry?;
        // No key of a registry has other characters, and an unfinished object has a '#'.
        let Some(name) = entry.file_name().to_str().filter(|name| !name.contains('#')).map(str::to_owned)
        else {
            continue;
        };
        let key = format!("{key}/{name}");
        let metadata = match entry.metadata() {
            Ok(metadata) => metadata,
            // It was deleted meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        if metadata.is_dir() {
            match walk(root, &key, listed) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                done => done?,
            }
        } else if metadata.is_file() {
            let modified = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
            let (modified_seconds, size_bytes) = (modified.as_secs() as i64, metadata.len());
            listed.push(ListedObject { key, modified_seconds, size_bytes });
        } else {
            return Err(io::Error::other(format!("{key} is neither a file nor a folder")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn everything_is_listed_or_the_list_fails() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert!(list(root, "names").unwrap().is_empty());
        assert!(list(&root.join("gone"), "names").is_err());
        fs::create_dir_all(root.join("names/debian")).unwrap();
        fs::write(root.join("names/debian/1"), "abc").unwrap();
        fs::write(root.join("names/debian/2#1"), "unfinished").unwrap();
        let found = list(root, "names").unwrap();
        assert_eq!((found.len(), found[0].key.as_str(), found[0].size_bytes), (1, "names/debian/1", 3));
        // A folder that cannot be read, also by root.
        symlink("loop", root.join("loop")).unwrap();
        assert!(list(root, "loop").is_err());
        fs::remove_dir_all(root.join("names")).unwrap();
        fs::write(root.join("names"), "").unwrap();
        assert!(list(root, "names").is_err());
    }
}
