//! The tables of the book against the tables of the code.

use std::path::Path;

use towpath_engine::DropReason;

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn drop_reasons_are_documented() {
    let text = page("reference/metrics.md");
    let section = text.split_once("## Drop reasons").expect("the section").1;
    let section = section.split_once("<!-- end -->").expect("the end of the table").0;
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
    let expected: Vec<String> =
        DropReason::ALL.iter().map(|reason| format!("| `{}` | {} |", reason.name(), reason.help())).collect();
    assert_eq!(rows, expected);
}
