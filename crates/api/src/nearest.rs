//! Suggestions for misspelled names. Owns nothing.

/// Returns the name that is nearest to a text, if at most a third of its letters differ.
pub fn nearest<'a>(text: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let with_distance = names.into_iter().map(|name| (distance(text, name), name));
    let (distance, name) = with_distance.min()?;
    (distance <= text.len().max(name.len()).div_ceil(3)).then_some(name)
}

/// Edit distance: letters to change, add, leave out or swap with their neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = change.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_understood_and_another_word_is_not() {
        let names = ["debian", "desk-001", "windows"];
        for (text, near) in
            [("debain", Some("debian")), ("debia", Some("debian")), ("desk-01", Some("desk-001"))]
        {
            assert_eq!(nearest(text, names), near);
        }
        assert_eq!(nearest("alpine", names), None);
        assert_eq!(nearest("x", []), None);
    }
}
