// The only list of the fields of the FFI attribute "codec". Host only. jaxcgx/codecs/attribute.py makes the attribute.
#pragma once

#include <string>
#include <type_traits>

#include "codec/base.h"

namespace jaxcgx {

// Calls f(name, field) for each field.
template <class Fn>
void each_field(Dense& d, const std::string& prefix, Fn f) {
  f(prefix + "kind", d.kind);
  f(prefix + "bits", d.bits);
  f(prefix + "bucket_size", d.bucket_size);
  f(prefix + "stochastic", d.stochastic);
  f(prefix + "skip_incomplete", d.skip_incomplete);
  f(prefix + "compatible", d.compatible);
  f(prefix + "rotate", d.rotate);
}
template <class Fn>
void each_field(Codec& c, Fn f) {
  each_field(c, "", f);
  f("ratio", c.sparse.ratio);
  f("lists", c.sparse.lists);
  f("top", c.sparse.top);
  f("select", c.sparse.select);
  f("share", c.sparse.share);
  f("lower", c.sparse.lower);
  f("refinements", c.sparse.refinements);
  each_field(c.sparse.values, "values_", f);
}

// The type of a field at the FFI boundary: flags and enumerations are int32.
template <class T>
using FieldType = std::conditional_t<std::is_enum_v<T> || std::is_same_v<T, bool>, int32_t, T>;

}  // namespace jaxcgx
