"""The page: one self-contained HTML file that shows a record, a mask or an atlas of heads.

The page is drawn from a header, which is JSON, and from chunks, which are bytes that it asks for by
name; a file holds both, a server and a notebook's kernel answer. Little endian throughout; axes in
the order of their names. The header, schema "clearhead.view", version 1:

    schema, version, title, made_by
    kind        "attention", "mask" or "atlas" ("attention" where it is missing)
    notes       [text]: what was found, such as that a model looks untrained
    holds       [text]: what is held and what was left out
    samples     how many
    axes        [{name, labels: [[text] a sample] or null, ids?, raw?: [[hexadecimal] a sample],
                  segments?: [[start, stop, name]], prompt?: positions of the prompt,
                  grid?: [rows, columns] of image patches, the last positions}]
    layers      [{layer, module, call, kind: "self" or "cross", heads: [number], queries, sources,
                  query_axis, source_axis: indices of axes, rows: [query] or null for all,
                  offset: source position of query 0, mask: chunk or null, check: number or null,
                  encoding: "f32", "log8" or null, steps?: codes an octave (16),
                  top: weights a row or 0, top_encoding: "f16", "f32", "log8" or "planes",
                  top_steps?: codes an octave (16), cells: of the block map a side or 0, sums,
                  live?: whether rows and columns are asked for, parts?: [{name, mask: chunk}],
                  why?: chunk or null, roles?: [[text] a head]}]
    statistics  [{name, label, unit, definition, paper}]
    effects     [{sample, query, source, layer, head, weight, effect, metric, where?}], null for
                  all; without a query a source was cut from all, without both a whole head
    chunks      {name: bytes}
    live?       true where the page is served, and reasons are asked for one by one
    other?      {title, name, other_name, layers}: a record to compare; its chunks are "other/..."

A chunk is named by sample S, index E in `layers` and index H in `heads`:

    full/S/E/H   all weights, (row, source), as `encoding` says
    top/S/E/H    the largest weights: sources (row, rank), uint16, or uint32 above 65,535 sources,
                 all ones where there is none; then weights (row, rank). As "planes", bytes (rank,
                 row): first differences of the sources in ascending order, the lowest byte first,
                 in 2 or 4 planes; then a plane of log codes, 0 where there is none
    block/S/E/H  mean, then largest weight of each block, log codes of 16 an octave; blocks are
                 split as torch.tensor_split does, at most one a position
    sums/S/E/H   the sum of each row, float32
    mask/S/E     for each query, or each row held: a count, then (start, stop) of the allowed runs,
                 uint32; layers may name one chunk
    statistics   float32, (statistic, sample, layer entry, head), NaN where there is none
    part/S/E/P   as mask/S/E, the edges of one part of the mask
    row/S/E/H/Q, column/S/E/H/K   where live: the weights of query Q, or on source K, float32
    why/S/E      why each edge is allowed or blocked: JSON, [[[text] a source] a query]
    why/S/E/Q/K  where the page is served, of one edge: JSON, [text]

A log code is one byte: 0 is zero, 255 is NaN, code c is 2 ** (-(c - 1) / steps).
"""

from __future__ import annotations

from clearhead.views.page.document import bundle, html, save, style

__all__ = ["bundle", "html", "save", "style"]
