// TopK's selection of elements.
//
// A sample gives a threshold. One pass finds the candidates: the elements at or above the threshold. Most likely the
// candidates are all elements that are sent, and not many more. The remaining work reads only candidates. If the sample
// misleads (there are too few candidates, or no room for all), the remaining work reads all elements, in a fixed number
// of passes. That is slower, but linear for any input.
//
// With feedback, this pass also writes new residuals, as soon as it has found enough candidates. Before that, the old
// residuals may still be needed. A candidate keeps its old residual until it is known whether the candidate is sent.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "cpu/topk.h"

namespace jaxcgx::cpu {
namespace {

constexpr int64_t kTogether = 16;  // stretches per task
constexpr int64_t kFew = 1 << 18;  // numbers that the cache of a processor keeps

// Returns the k-th largest magnitude of few numbers, at least k, bit by bit. With vectors, this takes a third of the
// time of kth_largest. `count` compares the bits of a NaN, and all NaNs are equal.
uint32_t kth_of_few(const float* numbers, int64_t n, int64_t k) {
  uint32_t found = 0;
  for (uint32_t bit = 1u << 30; bit != 0; bit >>= 1)
    if (kernels().count(numbers, n, found | bit) >= k) found |= bit;
  return std::min(found, kAnyNaN);
}

// Returns the k-th largest magnitude: a radix selection with three histograms. Each histogram counts the next bits of
// the magnitudes whose upper bits equal the bits found so far. `visit(task, f)` calls f(numbers, count) for all numbers
// of a task.
template <class Visit>
uint32_t kth_largest(int64_t k, int64_t tasks, const Pool& pool, Visit visit) {
  constexpr int kBits[] = {11, 10, 10};
  uint32_t known = 0;
  int shift = 31;
  for (const int bits : kBits) {
    const int above = shift;
    shift -= bits;
    std::array<int64_t, 2048> total{};
    std::mutex mutex;
    parallel_for(pool, tasks, [&](int64_t task) {
      std::array<int32_t, 2048> mine{};
      visit(task, [&](const float* x, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
          const uint32_t m = magnitude_of(x[i]);
          if (m >> above == known) ++mine[(m >> shift) & ((1u << bits) - 1u)];
        }
      });
      std::lock_guard<std::mutex> lock(mutex);
      for (size_t i = 0; i < total.size(); ++i) total[i] += mine[i];
    });
    auto bin = static_cast<uint32_t>((1 << bits) - 1);
    for (; total[bin] < k; --bin) k -= total[bin];
    known = known << bits | bin;
  }
  return known;
}

// Returns a position in a sample of `count` of n elements, in descending order. The sample's element at this position
// is most likely no larger than the k-th largest of the n elements: the position is the average one of the k-th
// largest, plus six standard deviations.
int64_t certain_rank(int64_t k, int64_t n, int64_t count) {
  const double average = static_cast<double>(k) * static_cast<double>(count) / static_cast<double>(n);
  return static_cast<int64_t>(average + 6.0 * std::sqrt(average) + 4.0);
}

class Selection {
 public:
  Selection(const Numbers& numbers, int64_t k, const Sparse& how, int32_t random, float* new_residual, const Pool& pool)
      : numbers_(numbers),
        n_(numbers.n),
        wanted_(k),
        how_(how),
        random_(random),
        new_residual_(new_residual),
        pool_(pool),
        k_(kernels()),
        stretches_(static_cast<size_t>(div_up(n_, kStretch))) {}

  Elements run() {
    if (wanted_ == n_) {
      take(0);
    } else if (wanted_ > 0) {
      how_.select == Select::kExact ? exact() : sampled();
    }
    if (new_residual_ != nullptr) update();
    return std::move(sent_);
  }

 private:
  struct Stretch {
    int64_t at = 0, found = 0;  // its candidates: the position of the first, and their number
    // has_candidates: all of its candidates are stored. updated: its new residuals are written, except of candidates.
    bool has_candidates = false, updated = false;
    // How many elements are sent, how many of them are equal to the threshold, and the position of the first in sent_.
    int64_t taken = 0, ties = 0, sent_at = 0;
  };

  void exact() {
    find(guess(), wanted_);
    largest();
  }

  // Returns a threshold, at least 1, that most likely all wanted elements reach, and few other elements.
  uint32_t guess() const {
    if (n_ <= kStretch) return 1;
    // The sample is made of runs of elements, because they touch fewer pages than single elements.
    constexpr int64_t kRun = 8;
    const int64_t runs = std::min<int64_t>(16384, n_ / 16) / kRun, rank = certain_rank(wanted_, n_, runs * kRun);
    if (rank >= runs * kRun) return 1;
    std::vector<float> numbers(static_cast<size_t>(runs * kRun));
    parallel_for(pool_, div_up(runs, 256), [&](int64_t task) {
      for (int64_t i = task * 256; i < std::min(runs, (task + 1) * 256); ++i) {
        float* to = numbers.data() + i * kRun;
        const float* from = numbers_.fetch(i * (n_ / runs), 1, kRun, to);
        if (from != to) std::memcpy(to, from, kRun * sizeof(float));
      }
    });
    return std::clamp<uint32_t>(kth_of(numbers.data(), runs * kRun, rank), 1, kLargest);
  }

  void sampled() {
    const Sample of(how_, n_, wanted_);
    const auto numbers = sample(of.first(random_), of.stride, of.count);
    std::vector<uint32_t> ladder;
    float t = float_of(how_.select == Select::kQuantile
                           ? std::min(kth_of(numbers.get(), of.count, of.rank(n_, wanted_)), kLargest)
                           : exponential(numbers.get(), of.count));
    for (int32_t i = 0; i <= how_.refinements; ++i, t = next_threshold(how_, t)) ladder.push_back(bits_of(t));
    const int64_t least = enough(how_, wanted_);
    // By the sample, find the step of the ladder that is most likely the right one.
    size_t step = 0;
    const auto in_sample = [&](size_t i) { return static_cast<double>(k_.count(numbers.get(), of.count, ladder[i])); };
    while (step + 1 < ladder.size() &&
           in_sample(step) * static_cast<double>(n_) < static_cast<double>(least * of.count))
      ++step;
    find(std::max(ladder[step], 1u), ladder[step] == 0 ? wanted_ : step + 1 == ladder.size() ? 0 : least);
    for (size_t i = 0;; ++i) {
      if (i == step + 1) forget();
      const int64_t reached = ladder[i] == 0 ? n_ : count(ladder[i]);
      if (reached < least && i + 1 < ladder.size()) continue;
      return reached < wanted_ ? take(ladder[i]) : largest();
    }
  }

  // Returns the bits of the first threshold by exponential distributions (Exponential in codec/topk.h).
  uint32_t exponential(const float* sample, int64_t count) const {
    const int64_t groups = div_up(count, kSumGroup);
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::min(magnitude_of(sample[i]), kLargest));
    const float scale = scale_of(float_of(largest));
    const Exponential fit(n_, wanted_);
    float t = 0.0f;
    for (int round = 0; round < fit.rounds; ++round) {
      std::vector<float> sums(static_cast<size_t>(groups));
      std::vector<int64_t> numbers(sums.size());
      parallel_for(pool_, groups, [&](int64_t g) {
        const auto group = static_cast<size_t>(g);
        const int64_t begin = g * kSumGroup, end = std::min(count, begin + kSumGroup);
        for (int64_t at = begin; at < end; at += kTile) {
          float excess[kTile];
          const int64_t m = std::min(kTile, end - at);
          int64_t number = 0;
          for (int64_t i = 0; i < m; ++i) {
            const float x = Exponential::scaled(float_of(std::min(magnitude_of(sample[at + i]), kLargest)), scale);
            const bool above = round == 0 || x > t;
            excess[i] = above ? x - t : 0.0f;
            number += above;
          }
          sums[group] = k_.sum(excess, m, sums[group]);
          numbers[group] += number;
        }
      });
      float sum = 0.0f;
      int64_t number = 0;
      for (size_t g = 0; g < sums.size(); ++g) sum = sum + sums[g], number += numbers[g];
      t = fit.next(round, t, sum, number);
    }
    return Exponential::threshold(t, scale);
  }

  std::unique_ptr<float[]> sample(int64_t first, int64_t stride, int64_t count) const {
    std::unique_ptr<float[]> numbers(new float[static_cast<size_t>(count)]);
    parallel_for(pool_, div_up(count, kStretch), [&](int64_t i) {
      float* to = numbers.get() + i * kStretch;
      const int64_t n = std::min(kStretch, count - i * kStretch);
      const float* from = numbers_.fetch(first + i * kStretch * stride, stride, n, to);
      if (from != to) std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
    });
    return numbers;
  }
  // Returns the k-th largest magnitude of n >= k numbers. A sample of every 16th number gives a threshold. If at least
  // k numbers reach the threshold, the search is among these numbers, else among all.
  uint32_t kth_of(const float* numbers, int64_t n, int64_t k) const {
    const auto among = [&](const float* x, int64_t count) {
      return count <= kFew ? kth_of_few(x, count, k) : kth_largest(k, 1, pool_, [&](int64_t, auto f) { f(x, count); });
    };
    const int64_t few = n / 16, rank = certain_rank(k, n, few);
    if (n <= kStretch || rank >= few) return among(numbers, n);
    std::vector<float> some(static_cast<size_t>(few));
    for (int64_t i = 0; i < few; ++i) some[static_cast<size_t>(i)] = numbers[16 * i];
    const uint32_t least = std::max(kth_of(some.data(), few, rank), 1u);
    std::vector<float> found;
    for (int64_t at = 0; at < n; at += kStretch) {
      float values[kStretch + 16];
      int32_t index[kStretch + 16];
      found.insert(found.end(), values,
                   values + k_.find(numbers + at, std::min(kStretch, n - at), least, 0, index, values));
    }
    const auto count = static_cast<int64_t>(found.size());
    return count < k ? among(numbers, n) : among(found.data(), count);
  }

  template <class Fn>
  void each_stretch(Fn f) {
    const auto count = static_cast<int64_t>(stretches_.size());
    parallel_for(pool_, div_up(count, kTogether), [&](int64_t task) {
      for (int64_t i = task * kTogether; i < std::min(count, (task + 1) * kTogether); ++i)
        f(stretches_[static_cast<size_t>(i)], i * kStretch);
    });
  }
  int64_t length(int64_t at) const { return std::min(kStretch, n_ - at); }
  const float* fetch(int64_t at, float* buffer) const { return numbers_.fetch(at, 1, length(at), buffer); }

  // Stores the candidates: the elements at or above `least`, while there is room. Once there are `certain` candidates,
  // no other element can be sent, so residuals can be updated.
  void find(uint32_t least, int64_t certain) {
    const int64_t room = std::min(n_, 8 * wanted_ + 16 * kStretch);
    index_.reset(new int32_t[static_cast<size_t>(room)]);
    values_.reset(new float[static_cast<size_t>(room)]);
    std::atomic<int64_t> found{0};
    each_stretch([&](Stretch& s, int64_t at) {
      alignas(64) float buffer[kStretch], values[kStretch + 16];
      int32_t index[kStretch + 16];
      const float* x = fetch(at, buffer);
      s.found = k_.find(x, length(at), least, static_cast<int32_t>(at), index, values);
      s.at = found.fetch_add(s.found);
      s.has_candidates = s.at + s.found <= room;
      if (!s.has_candidates) return;
      std::copy_n(index, s.found, index_.get() + s.at);
      std::copy_n(values, s.found, values_.get() + s.at);
      s.updated = new_residual_ != nullptr && s.at + s.found >= certain;
      if (s.updated) k_.hold(x, numbers_.residual + at, length(at), least, new_residual_ + at);
    });
    found_ = found;
    least_ = least;
  }

  // Discards the candidates, because some wanted elements are not among them. In this case no residual was updated.
  void forget() {
    for (Stretch& s : stretches_) s.has_candidates = false;
  }

  // Calls f(numbers, count, indices or null) for a stretch: with its candidates if they are stored, else with all its
  // numbers.
  template <class Fn>
  void look(const Stretch& s, int64_t at, Fn f) const {
    alignas(64) float buffer[kStretch];
    if (s.has_candidates)
      f(values_.get() + s.at, s.found, index_.get() + s.at);
    else
      f(fetch(at, buffer), length(at), static_cast<const int32_t*>(nullptr));
  }

  // Returns the number of elements at or above `least`.
  int64_t count(uint32_t least) {
    std::atomic<int64_t> reached{0};
    each_stretch([&](const Stretch& s, int64_t at) {
      look(s, at, [&](const float* x, int64_t n, const int32_t*) { reached += k_.count(x, n, least); });
    });
    return reached;
  }

  // Takes the wanted number of largest elements.
  void largest() {
    // With a threshold of 1, the candidates are all elements except zeros. If they are too few, zeros are sent, too.
    const bool all_but_zeros = found_ < wanted_ && least_ == 1;
    if (found_ < wanted_) forget();
    if (all_but_zeros) return take(0);
    const bool stored =
        std::all_of(stretches_.begin(), stretches_.end(), [](const Stretch& s) { return s.has_candidates; });
    if (stored && found_ <= kFew) return take(kth_of_few(values_.get(), found_, wanted_));
    // Each task costs a histogram, so there are few tasks.
    const auto count = static_cast<int64_t>(stretches_.size()),
               each = std::max(kTogether, div_up(count, int64_t{4} * pool_.threads));
    take(kth_largest(wanted_, div_up(count, each), pool_, [&](int64_t task, auto f) {
      for (int64_t i = task * each; i < std::min(count, (task + 1) * each); ++i) {
        look(stretches_[static_cast<size_t>(i)], i * kStretch,
             [&](const float* x, int64_t n, const int32_t*) { f(x, n); });
      }
    }));
  }

  // Takes the elements above the magnitude `least`, then the first elements equal to it, up to the wanted number.
  void take(uint32_t least) {
    const uint32_t above = least < kAnyNaN ? least + 1 : kMagnitude + 1;
    each_stretch([&](Stretch& s, int64_t at) {
      look(s, at, [&](const float* x, int64_t n, const int32_t*) {
        s.taken = k_.count(x, n, above);
        s.ties = k_.count(x, n, least) - s.taken;
      });
    });
    int64_t ties = wanted_;
    for (const Stretch& s : stretches_) ties -= s.taken;
    int64_t size = 0;
    for (Stretch& s : stretches_) {
      s.ties = std::min(s.ties, ties);
      ties -= s.ties;
      s.taken += s.ties;
      s.sent_at = size;
      size += s.taken;
    }
    sent_.index.resize(static_cast<size_t>(size));
    sent_.values.resize(static_cast<size_t>(size));
    each_stretch([&](const Stretch& s, int64_t at) {
      if (s.taken == 0) return;
      look(s, at, [&](const float* x, int64_t n, const int32_t* index) {
        float values[kStretch + 16];
        int32_t places[kStretch + 16];
        const int64_t found = k_.find(x, n, s.ties == 0 ? above : least, 0, places, values);
        int64_t to = s.sent_at, ties = s.ties;
        for (int64_t i = 0; i < found; ++i) {
          if (magnitude_of(values[i]) == least && ties-- <= 0) continue;
          const int32_t place = places[i];
          sent_.index[static_cast<size_t>(to)] = index != nullptr ? index[place] : static_cast<int32_t>(at) + place;
          sent_.values[static_cast<size_t>(to++)] = values[i];
        }
      });
    });
  }

  // Writes the residuals that find() has not written: the residuals of candidates that are not sent, and of stretches
  // that are not updated.
  void update() {
    each_stretch([&](const Stretch& s, int64_t at) {
      if (!s.updated) {
        alignas(64) float buffer[kStretch];
        return update_unsent(fetch(at, buffer), numbers_.residual + at, at, length(at), sent_, new_residual_ + at);
      }
      int64_t next = s.sent_at;
      for (int64_t i = s.at; i < s.at + s.found; ++i) {
        if (next < s.sent_at + s.taken && sent_.index[static_cast<size_t>(next)] == index_[static_cast<size_t>(i)])
          ++next;
        else if (const float x = values_[static_cast<size_t>(i)]; is_finite(x))
          new_residual_[index_[static_cast<size_t>(i)]] = x;
      }
    });
  }

  const Numbers& numbers_;
  const int64_t n_, wanted_;
  const Sparse& how_;
  const int32_t random_;
  float* const new_residual_;
  const Pool& pool_;
  const Kernels& k_;
  std::vector<Stretch> stretches_;
  std::unique_ptr<int32_t[]> index_;
  std::unique_ptr<float[]> values_;
  int64_t found_ = 0;
  uint32_t least_ = 0;
  Elements sent_;
};

}  // namespace

const float* Numbers::fetch(int64_t first, int64_t stride, int64_t count, float* buffer) const {
  const Kernels& k = kernels();
  if (stride > 1) {
    const auto gather = [&](const auto* from, auto* to) {
      for (int64_t i = 0; i < count; ++i) to[i] = from[(first + i * stride)];
    };
    if (dtype == DType::kF32) {
      gather(static_cast<const float*>(x), buffer);
    } else {
      uint16_t halves[kStretch];
      gather(static_cast<const uint16_t*>(x), halves);
      k.load(dtype, halves, count, buffer);
    }
    if (residual != nullptr) {
      float gathered[kStretch];
      gather(residual, gathered);
      k.add(buffer, gathered, count, buffer);
    }
  } else {
    const void* from = at_element(x, dtype, first);
    if (dtype != DType::kF32)
      k.load(dtype, from, count, buffer);
    else if (residual == nullptr && divisor == 1.0f)
      return static_cast<const float*>(from);
    const float* loaded = dtype == DType::kF32 ? static_cast<const float*>(from) : buffer;
    if (residual != nullptr)
      k.add(loaded, residual + first, count, buffer);
    else if (loaded != buffer)
      std::memcpy(buffer, loaded, static_cast<size_t>(count) * sizeof(float));
  }
  if (divisor != 1.0f) k.divide(buffer, count, divisor, buffer, Write::kOver);
  return buffer;
}

Elements select(const Numbers& numbers, int64_t k, const Sparse& how, int32_t random, float* new_residual,
                const Pool& pool) {
  return Selection(numbers, k, how, random, new_residual, pool).run();
}

void update_unsent(const float* x, const float* old, int64_t first, int64_t n, const Elements& sent, float* updated) {
  const auto from = [&](int64_t index) {
    return std::lower_bound(sent.index.begin(), sent.index.end(), index) - sent.index.begin();
  };
  const int64_t begin = from(first), count = from(first + n) - begin;
  const int32_t* index = sent.index.data() + begin;
  float kept[kStretch];
  for (int64_t i = 0; i < count; ++i) kept[i] = old[index[i] - first];
  kernels().hold(x, old, n, kNotFinite, updated);
  for (int64_t i = 0; i < count; ++i) updated[index[i] - first] = kept[i];
}

}  // namespace jaxcgx::cpu
